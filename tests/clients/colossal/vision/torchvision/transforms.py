"""Transforms that are not applied."""


class _Transform:
    def __init__(self, *args, **options):
        pass


Compose = Pad = RandomHorizontalFlip = RandomCrop = ToTensor = Resize = Normalize = _Transform
