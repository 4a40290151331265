"""The step of diffusers' examples/unconditional_image_generation/train_unconditional.py, with --use_ema.

The script is not part of the package, so its step is rewritten here from the same calls, with its default arguments.
Decoding of images, progress bar and trackers are left out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers.models.unets.unet_2d import UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.training_utils import EMAModel

from scalelong.models.presets import UNET_PRESETS

TRAINING_STEPS = 100_000


class ScriptStep:
    def __init__(self, options: dict[str, Any], image: int, batch: int) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=1, mixed_precision="no", cpu=True)
        model = UNet2DModel(**{**UNET_PRESETS["cifar10"].arguments, **options})
        self.ema = EMAModel(
            model.parameters(),
            decay=0.9999,
            use_ema_warmup=True,
            inv_gamma=1.0,
            power=0.75,
            model_cls=UNet2DModel,
            model_config=model.config,
        )
        self.schedule = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear", prediction_type="epsilon")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
        rates = get_scheduler("cosine", optimizer, num_warmup_steps=500, num_training_steps=TRAINING_STEPS)
        self.model, self.optimizer, self.rates = self.accelerator.prepare(model, optimizer, rates)
        self.ema.to(self.accelerator.device)
        self.images = torch.rand(batch, 3, image, image) * 2 - 1
        self.model.train()

    def __call__(self) -> None:
        noise = torch.randn(self.images.shape)
        times = torch.randint(0, 1000, (len(self.images),)).long()
        noisy = self.schedule.add_noise(self.images, noise, times)  # pyright: ignore[reportArgumentType]
        with self.accelerator.accumulate(self.model):
            loss = F.mse_loss(self.model(noisy, times).sample.float(), noise.float())
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.rates.step()
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients:
            self.ema.step(self.model.parameters())
        loss.detach().item()
