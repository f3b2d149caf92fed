"""Random images."""

import os

import torch


class CIFAR10(torch.utils.data.Dataset):
    """Random images of 10 kinds, each kind with a mean of its own."""

    def __init__(self, root, train=True, transform=None, download=False):
        generator = torch.Generator().manual_seed(int(train))
        count = int(os.environ.get("IMAGES", "200"))
        self.labels = torch.arange(count) % 10
        means = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(7))
        self.images = means[self.labels] + 0.3 * torch.randn(count, 3, 32, 32, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])
