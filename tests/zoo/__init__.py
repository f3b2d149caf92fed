"""The zoo: one step of many models as others write them, by `apex.boost` and by `torch.autocast`, beside float32."""
