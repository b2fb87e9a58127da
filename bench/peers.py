"""What mollification is measured against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import scipy.fft
import torch
import torch.nn.functional as F
from torch import Tensor

from fastmoll.kernels.draw import BLUR, NOISE
from fastmoll.kernels.heat_blur import checked_blur_scale, cosine_table


class DenseDCT:
    """The way of the paper's published code: dense cosine transforms and a boolean mask a role, in place.

    The blur is two linear layers (one an axis) to the cosine coefficients, their decay, and two layers back. Images of
    one role are gathered by a boolean mask and scattered back; noise is ``torch.randn_like``.

    Args:
        size: height and width of the images.
        device: where they are.
        compiled: put the arithmetic of both roles through ``torch.compile``; masks would break its graphs.
    """

    def __init__(self, size: int, device: torch.device, compiled: bool = False) -> None:
        k = torch.arange(size, dtype=torch.float64)
        transform = math.sqrt(2 / size) * torch.cos(math.pi / size * k.unsqueeze(1) * (k + 0.5))
        transform[0] /= math.sqrt(2)
        frequency = (math.pi / size * k) ** 2
        self.size = size
        self.forward = transform.float().to(device)
        self.inverse = transform.T.float().contiguous().to(device)
        self.decay = (frequency.unsqueeze(1) + frequency).float().to(device)
        self._noised = torch.compile(self.noised) if compiled else self.noised
        self._blurred = torch.compile(self.blurred) if compiled else self.blurred

    @staticmethod
    def _both_axes(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(F.linear(x, weight).transpose(-1, -2), weight).transpose(-1, -2)

    @staticmethod
    def noised(x: Tensor, t: Tensor) -> Tensor:
        """Noise images ``(B, C, H, W)`` at temperatures ``(B,)``."""
        quarter = (math.pi / 2) * t.view(-1, 1, 1, 1)
        return torch.cos(quarter) * x + torch.sin(quarter) * torch.randn_like(x)

    def damping(self, t: Tensor) -> Tensor:
        """What is left of each cosine coefficient, ``(B, 1, size, size)``."""
        time = checked_blur_scale(t, 0.3, self.size).square() / 2
        return torch.exp(-self.decay * time.view(-1, 1, 1, 1))

    def blurred(self, x: Tensor, t: Tensor) -> Tensor:
        """Blur images ``(B, C, size, size)`` at temperatures ``(B,)``."""
        return self._both_axes(self.damping(t) * self._both_axes(x, self.forward), self.inverse)

    @torch.no_grad()
    def __call__(self, x: Tensor, role: Tensor, t: Tensor) -> Tensor:
        """Mollify the batch ``x`` in place."""
        chosen = role == NOISE
        if chosen.any():
            x[chosen] = self._noised(x[chosen], t[chosen])
        chosen = role == BLUR
        if chosen.any():
            x[chosen] = self._blurred(x[chosen], t[chosen])
        return x


class FourierDCT(DenseDCT):
    """The same, with the cosine transforms by FFT (cuFFT on a GPU).

    The numbers of a line are put in the order 0, 2, 4, ... 5, 3, 1; the transform of that, turned by ``exp(-iπk/2N)``,
    has coefficient ``k`` as its real and coefficient ``N - k`` as its negative imaginary part (Makhoul, 1980), so
    that half a complex spectrum is enough.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device)
        phase = math.pi / (2 * size) * torch.arange(size // 2 + 1, dtype=torch.float64)
        self.turn = torch.polar(torch.ones_like(phase), -phase).to(device, torch.complex64)
        order = torch.arange(size)
        self.order = torch.cat((order[::2], order[1::2].flip(0))).to(device)
        self.back = torch.argsort(self.order)

    def cosines(self, x: Tensor) -> Tensor:
        """The DCT-II of the last axis, not normalised."""
        turned = torch.fft.rfft(x[..., self.order]) * self.turn
        return torch.cat((turned.real, -turned.imag[..., 1 : (self.size + 1) // 2].flip(-1)), dim=-1)

    def pixels(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`cosines`."""
        half = self.size // 2 + 1
        mirrored = F.pad(x[..., self.size - half + 1 :].flip(-1), (1, 0))
        lines: Tensor = torch.fft.irfft(torch.complex(x[..., :half], -mirrored) * self.turn.conj(), n=self.size)
        return lines[..., self.back]

    def blurred(self, x: Tensor, t: Tensor) -> Tensor:
        """As :meth:`DenseDCT.blurred`."""
        coefficients = self.cosines(self.cosines(x).mT).mT * self.damping(t)
        return self.pixels(self.pixels(coefficients).mT).mT


class ScipyDCT(DenseDCT):
    """The same, with the cosine transforms of ``scipy.fft``, on a CPU."""

    def blurred(self, x: Tensor, t: Tensor) -> Tensor:
        """As :meth:`DenseDCT.blurred`."""
        threads = torch.get_num_threads()
        coefficients = scipy.fft.dctn(x.numpy(), axes=(2, 3), workers=threads) * self.damping(t).numpy()
        return torch.from_numpy(scipy.fft.idctn(coefficients, axes=(2, 3), workers=threads, overwrite_x=True))


class Authors:
    """Mollification of a loaded batch with its labels, the way of the paper's code.

    Args:
        size: height and width of the images.
        classes: of the labels.
        device: where the batches are.
    """

    def __init__(self, size: int, classes: int, device: torch.device) -> None:
        self.mollify = DenseDCT(size, device)
        self.classes = classes
        self.temperatures = torch.distributions.Beta(torch.tensor(1.0, device=device), torch.tensor(2.0, device=device))

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mollify ``images`` in place; gives them, and dense labels ``(B, K)``."""
        role = torch.randint(0, 3, labels.shape, device=labels.device)
        t = self.temperatures.sample(labels.shape)
        noise = torch.sin((math.pi / 2) * t) ** 2
        gamma = torch.where(role == NOISE, noise, torch.where(role == BLUR, t, 0.0)).unsqueeze(1)
        targets = (1 - gamma) * F.one_hot(labels, self.classes) + gamma / self.classes
        return self.mollify(images, role, t), targets


class PlainTail:
    """The batch tail in plain operations without a mask, a gather or a wait: what a compiler can take as one graph.

    Every image is blurred by products with its own matrices, in the precision of ``operand``, every image gets noise,
    and the role chooses.

    Args:
        size: height and width of the images.
        mean: per channel, for pixels in [0, 1].
        std: likewise.
        operand: dtype of the factors in the products.
        dtype: of the result, which is in channels-last memory.
        device: where the images are.
    """

    def __init__(
        self,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        operand: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.mean, self.std = (torch.tensor(value, device=device).view(3, 1, 1) for value in (mean, std))
        self.size, self.operand, self.dtype = size, operand, dtype
        self.table = cosine_table(size, device)
        self.frequency = math.pi / size * torch.arange(size, device=device, dtype=torch.float64)
        place = torch.arange(size, device=device)
        self.apart = (place.unsqueeze(1) - place).abs()
        self.together = place.unsqueeze(1) + place + 1

    def __call__(
        self,
        pixels: Tensor,
        flip: Tensor,
        partner: Tensor | None = None,
        lam: Tensor | None = None,
        role: Tensor | None = None,
        t: Tensor | None = None,
        noise: bool = True,
    ) -> Tensor:
        """uint8 ``(B, size, size, 3)`` to ``(B, 3, size, size)``; without ``noise``, no image may have that role."""
        x = (pixels.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std
        x = torch.where(flip.view(-1, 1, 1, 1), x.flip(3), x)
        if partner is not None and lam is not None:
            weight = lam.view(-1, 1, 1, 1)
            x = weight * x + (1 - weight) * x[partner]
        if role is not None and t is not None:
            choice, level = role.view(-1, 1, 1, 1), (math.pi / 2) * t.view(-1, 1, 1, 1)
            sigma = checked_blur_scale(t.double(), 0.3, self.size)
            line = torch.exp(-0.5 * (sigma.unsqueeze(1) * self.frequency).square()) @ self.table
            matrix = (line[:, self.apart] + line[:, self.together]).to(self.operand)
            rows = torch.einsum("bchw,bwv->bchv", x.to(self.operand), matrix)
            out = torch.where(choice == BLUR, torch.einsum("bgh,bchv->bcgv", matrix, rows).float(), x)
            if noise:
                out = torch.where(choice == NOISE, torch.cos(level) * x + torch.sin(level) * torch.randn_like(x), out)
            x = out
        return x.to(self.dtype, memory_format=torch.channels_last)
