# ruff: noqa
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The pipeline of an exported model: needs torch and diffusers, and transformers if the model has a text encoder.

pipeline = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
pipeline(class_labels=[3], guidance_scale=2.0).images[0]        # a class-conditional model
pipeline(prompt="a red circle", guidance_scale=2.0).images[0]   # a text-conditional model
"""

import hashlib
import inspect
import re

import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor


class ExportedPipeline(DiffusionPipeline):
    _optional_components = ["vae", "text_encoder", "tokenizer"]

    def __init__(
        self,
        unet,
        scheduler,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        time_scale=1.0,
        time_shift=0.0,
        classes=None,
        null_label=None,
        text=None,
    ):
        """At step k of the scheduler the network is told the time `time_scale` k + `time_shift`.

        `classes`: the label of each name. `text`: the length and size of its tokens, whether texts were dropped in
        training, and the vocabulary of a model that is told hashed words, without a text encoder.
        """
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer)
        self.register_to_config(
            time_scale=time_scale, time_shift=time_shift, classes=classes, null_label=null_label, text=text
        )

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
        prompt=None,
        prompt_embeds=None,
        negative_prompt_embeds=None,
    ):
        """`class_labels`: names or numbers, one per image. `prompt`: a text for all images, or one per image.

        `prompt_embeds` are the tokens of texts, (images, length, size), in place of a prompt; guidance then needs
        `negative_prompt_embeds` too, unless the pipeline can encode the empty text. `guidance_scale` 1 is none.
        """
        if class_labels is not None and self.config.classes is None:
            raise ValueError("this model was trained without classes")
        if (prompt is not None or prompt_embeds is not None) and self.config.text is None:
            raise ValueError("this model was trained without texts")
        name, told, null = None, None, None
        if self.config.classes is not None:
            name, told, null = "class_labels", self._labels(class_labels), self.config.null_label
            null = None if null is None else torch.tensor(null, device=told.device)
        elif self.config.text is not None:
            name, told = "encoder_hidden_states", self._tokens(prompt, prompt_embeds, batch_size)
            null = self._null_tokens(negative_prompt_embeds) if guidance_scale != 1 else None
        if told is not None and guidance_scale != 1 and null is None:
            raise ValueError("the null condition of this model is not known, so guidance_scale must be 1")
        batch_size = batch_size if told is None else len(told)
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
            output = self._predict(self.scheduler.scale_model_input(x, step), step, name, told, null, guidance_scale)
            x = self.scheduler.step(output, step, x, **options).prev_sample
        images = self._finish(x, output_type)
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _labels(self, wanted):
        classes = self.config.classes
        if wanted is None:
            raise ValueError(f"class_labels must be given: names or numbers of {classes}")
        unknown = [entry for entry in wanted if isinstance(entry, str) and entry not in classes]
        if unknown:
            raise ValueError(f"there is no class {unknown[0]!r}; there are {list(classes)}")
        numbers = [classes[entry] if isinstance(entry, str) else int(entry) for entry in wanted]
        return torch.tensor(numbers, device=self._execution_device)

    def _tokens(self, prompt, tokens, batch_size):
        if tokens is None:
            if prompt is None:
                raise ValueError("a prompt must be given: a text, or a list with one text per image")
            tokens = self._encode([prompt] * batch_size if isinstance(prompt, str) else list(prompt))
        length, dim = self.config.text["length"], self.config.text["dim"]
        if tuple(tokens.shape[1:]) != (length, dim):
            raise ValueError(
                f"this model takes texts as tokens of (images, {length}, {dim}), got {tuple(tokens.shape)}"
            )
        return tokens.to(self._execution_device, self.unet.dtype)

    def _null_tokens(self, tokens):
        if tokens is None and self.config.text["guided"]:
            tokens = self._encode([""])
        return None if tokens is None else tokens.to(self._execution_device, self.unet.dtype)

    def _encode(self, texts):
        """(texts, length, size). Longer texts are cut off by a text encoder, and refused as words."""
        length = self.config.text["length"]
        if self.text_encoder is not None:
            tokens = self.tokenizer(
                texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
            )
            return self.text_encoder(tokens["input_ids"].to(self.text_encoder.device)).last_hidden_state
        if "vocabulary" not in self.config.text:
            raise ValueError("this pipeline has no text encoder: give prompt_embeds, the tokens of the texts")
        found = torch.zeros(len(texts), length, self.config.text["dim"])
        for row, text in zip(found, texts):
            words, known = re.findall(r"\w+", text.lower()), self.config.text["vocabulary"]
            unknown = [] if known is None else [word for word in words if word not in known]
            if unknown:
                raise ValueError(f"no text that the model was trained on has the word {unknown[0]!r}; it knows {known}")
            if len(words) > length:
                raise ValueError(f"{text!r} has {len(words)} words, and the model was made for {length}")
            for place, word in enumerate(words):
                row[place] = _vector(word, self.config.text["dim"])
        return found

    def _predict(self, x, step, name, told, null, guidance_scale):
        time = self.config.time_scale * step.float() + self.config.time_shift
        time = time.to(x.device).expand(len(x))
        if told is None:
            return self.unet(x, time).sample
        if guidance_scale == 1:
            return self.unet(x, time, **{name: told}).sample
        both = torch.cat([told, null.expand_as(told)])
        told, untold = self.unet(torch.cat([x, x]), torch.cat([time, time]), **{name: both}).sample.chunk(2)
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


def _vector(word, dim):
    """The numbers of a word: ±1, from its hash."""
    digest = hashlib.shake_128(word.encode()).digest(-(-dim // 8))
    bits = [byte >> shift & 1 for byte in digest for shift in range(8)]
    return torch.tensor(bits[:dim], dtype=torch.float32) * 2 - 1
