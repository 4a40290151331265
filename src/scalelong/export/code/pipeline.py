# ruff: noqa
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The pipeline of an exported model: needs torch and diffusers.

DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)(class_labels=[3], guidance_scale=2.0).images[0]
"""

import inspect

import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor


class ExportedPipeline(DiffusionPipeline):
    _optional_components = ["vae"]

    def __init__(self, unet, scheduler, vae=None, time_scale=1.0, time_shift=0.0, classes=None, null_label=None):
        """At step k of the scheduler the network is told the time `time_scale` k + `time_shift`."""
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae)
        self.register_to_config(time_scale=time_scale, time_shift=time_shift, classes=classes, null_label=null_label)

    @torch.no_grad()
    def __call__(
        self,
        batch_size=1,
        class_labels=None,
        guidance_scale=1.0,
        generator=None,
        num_inference_steps=50,
        output_type="pil",
        return_dict=True,
    ):
        """`class_labels`: names or numbers, one per image. `guidance_scale` 1 is none."""
        labels = self._labels(class_labels, guidance_scale)
        batch_size = batch_size if labels is None else len(labels)
        size = self.unet.config.sample_size
        size = (size, size) if isinstance(size, int) else tuple(size)
        device = self._execution_device
        shape = (batch_size, self.unet.config.in_channels, *size)
        self.scheduler.set_timesteps(num_inference_steps)
        if hasattr(self.scheduler, "set_begin_index"):
            self.scheduler.set_begin_index(0)
        x = randn_tensor(shape, generator=generator, device=device, dtype=self.unet.dtype)
        x = x * self.scheduler.init_noise_sigma
        accepted = inspect.signature(self.scheduler.step).parameters
        options = {"generator": generator} if "generator" in accepted else {}
        for step in self.progress_bar(self.scheduler.timesteps):
            output = self._predict(self.scheduler.scale_model_input(x, step), step, labels, guidance_scale)
            x = self.scheduler.step(output, step, x, **options).prev_sample
        images = self._finish(x, output_type)
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _labels(self, wanted, guidance_scale):
        classes, null = self.config.classes, self.config.null_label
        if classes is None:
            if wanted is not None:
                raise ValueError("this model was trained without classes")
            return None
        if wanted is None:
            raise ValueError(f"class_labels must be given: names or numbers of {classes}")
        if guidance_scale != 1 and null is None:
            raise ValueError("this model was trained without hidden classes, so guidance_scale must be 1")
        numbers = [classes.index(entry) if isinstance(entry, str) else int(entry) for entry in wanted]
        return torch.tensor(numbers, device=self._execution_device)

    def _predict(self, x, step, labels, guidance_scale):
        time = self.config.time_scale * step.float() + self.config.time_shift
        time = time.to(x.device).expand(len(x))
        if labels is None:
            return self.unet(x, time).sample
        if guidance_scale == 1:
            return self.unet(x, time, class_labels=labels).sample
        both = torch.cat([labels, torch.full_like(labels, self.config.null_label)])
        told, untold = self.unet(torch.cat([x, x]), torch.cat([time, time]), class_labels=both).sample.chunk(2)
        return untold + guidance_scale * (told - untold)

    def _finish(self, x, output_type):
        if self.vae is not None:
            shift = getattr(self.vae.config, "shift_factor", None) or 0.0
            x = self.vae.decode(x / self.vae.config.scaling_factor + shift).sample
        x = (x / 2 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return x
        array = x.cpu().permute(0, 2, 3, 1).float().numpy()
        return self.numpy_to_pil(array) if output_type == "pil" else array
