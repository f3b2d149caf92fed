"""A GAN under amp: two models, two optimizers, and three losses with a loss scale each."""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from apex import amp

SIDE = 16


def make_generator(noise: int, width: int) -> nn.Module:
    """Noise (B, noise, 1, 1) to pictures (B, 1, 16, 16)."""
    return nn.Sequential(
        nn.ConvTranspose2d(noise, 2 * width, 4, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def make_discriminator(width: int) -> nn.Module:
    """Pictures (B, 1, 16, 16) to logits (B, 1): positive for real."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 4),
        nn.Flatten(),
    )


def real_pictures(count: int, device: str) -> Tensor:
    """Round blobs at random places, values from -1 to 1."""
    centre = torch.rand(2, count, 1, 1, device=device) * (SIDE / 2) + SIDE / 4
    row, column = torch.meshgrid(*[torch.arange(SIDE, device=device)] * 2, indexing="ij")
    distance = (row - centre[0]) ** 2 + (column - centre[1]) ** 2
    return (2 * (-distance / 8).exp() - 1)[:, None]


def write_picture(pictures: Tensor, path: Path) -> None:
    """Pictures side by side as a PGM file."""
    sheet = torch.cat(list(pictures[:, 0]), dim=1).float().cpu()
    values = ((sheet + 1) * 127.5).clamp(0, 255).byte()
    path.write_bytes(b"P5 %d %d 255\n" % (values.shape[1], values.shape[0]) + bytes(values.flatten().tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--opt-level", default="O1", choices=("O0", "O1", "O2", "O3", "O4", "O5"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64, help="pictures per step (default: %(default)s)")
    parser.add_argument("--width", type=int, default=32, help="channels of the models (default: %(default)s)")
    parser.add_argument("--noise", type=int, default=16, help="numbers a picture is made from (default: %(default)s)")
    parser.add_argument("--picture-every", type=int, default=200, help="steps between pictures (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("."), help="folder for the pictures (default: here)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    generator = make_generator(args.noise, args.width).to(args.device)
    discriminator = make_discriminator(args.width).to(args.device)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    [generator, discriminator], [generator_optimizer, discriminator_optimizer] = amp.initialize(
        [generator, discriminator],
        [generator_optimizer, discriminator_optimizer],
        opt_level=args.opt_level,
        num_losses=3,
    )

    fixed_noise = torch.randn(16, args.noise, 1, 1, device=args.device)
    real, made = (torch.full((args.batch, 1), value, device=args.device) for value in (1.0, 0.0))
    for step in range(1, args.steps + 1):
        # The discriminator learns to tell real from made; the gradients of its two losses add up.
        discriminator_optimizer.zero_grad()
        logits = discriminator(real_pictures(args.batch, args.device))
        loss_on_real = binary_cross_entropy_with_logits(logits, real)
        with amp.scale_loss(loss_on_real, discriminator_optimizer, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        pictures = generator(torch.randn(args.batch, args.noise, 1, 1, device=args.device))
        loss_on_made = binary_cross_entropy_with_logits(discriminator(pictures.detach()), made)
        with amp.scale_loss(loss_on_made, discriminator_optimizer, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        discriminator_optimizer.step()

        # The generator learns to make what the discriminator takes for real.
        generator_optimizer.zero_grad()
        loss_of_generator = binary_cross_entropy_with_logits(discriminator(pictures), real)
        with amp.scale_loss(loss_of_generator, generator_optimizer, loss_id=2) as scaled_loss:
            scaled_loss.backward()
        generator_optimizer.step()

        if step in (1, args.steps) or step % 50 == 0:
            losses = (loss_on_real, loss_on_made, loss_of_generator)
            print("step {}: real {:.3f}, made {:.3f}, generator {:.3f}".format(step, *(loss.item() for loss in losses)))
        if step == args.steps or step % args.picture_every == 0:
            generator.eval()
            with torch.no_grad():
                write_picture(generator(fixed_noise), args.output / f"step{step}.pgm")
            generator.train()


if __name__ == "__main__":
    main()
