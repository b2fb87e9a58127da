"""What tests of ``Mollify`` share: batches, what comes out of them, schedules of one's own."""

import torch

from fastmoll.kernels.cosine_noise import cosine_noise
from fastmoll.kernels.draw import BLUR, NOISE, PURE_NOISE
from fastmoll.kernels.heat_blur import heat_blur
from fastmoll.kernels.soft_labels import label_decay, soft_labels

CLASSES = 7
MEMORY_FORMATS = [torch.contiguous_format, torch.channels_last]


def batch(size=24, height=12, width=10, dtype=torch.float32):
    generator = torch.Generator().manual_seed(size)
    images = torch.randn(size, 3, height, width, generator=generator).to(dtype)
    return images, torch.randint(CLASSES, (size,), generator=generator), torch.arange(1000, 1000 + size)


def expected(mollify, images, labels, index, epoch):
    """The same from the public operations, image by image."""
    role, t = mollify.draw(index, epoch)
    gamma = label_decay(role, t, k_noise=mollify.k_noise, k_blur=mollify.k_blur)
    out = images.clone()
    for i, kind in enumerate(role.tolist()):
        one = slice(i, i + 1)
        if kind in (NOISE, PURE_NOISE):
            out[one] = cosine_noise(images[one], t[one], seed=mollify.seed, epoch=epoch, index=index[one])
        if kind == BLUR:
            out[one] = heat_blur(images[one], t[one], sigma_min=mollify.sigma_min, sigma_max=mollify.sigma_max)
    return role, out, soft_labels(labels, gamma, mollify.num_classes, kind=mollify.kind)


def square_root(u):
    """The quantile function of Beta(2, 1)."""
    return u.sqrt()


def half_of_noise(role, t):
    return torch.where(role == NOISE, t / 2, (role == PURE_NOISE).float())


def linear(t):
    return 1.0 + 5.0 * t
