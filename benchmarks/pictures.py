"""The same pictures as a folder, a zip, a parquet file and an .npz."""

import io
import zipfile
from pathlib import Path

import torch

from scalelong.optional import needs


def write_sources(folder: Path, count: int, size: int) -> dict[str, str]:
    """From a name to what `load_data` takes. Smooth noise gives PNG and JPEG about as much to do as photographs."""
    np, pa, pq = (needs(name, "train", "the data benchmark") for name in ("numpy", "pyarrow", "pyarrow.parquet"))
    coarse = torch.rand(count, 3, size // 8, size // 8, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 1).mul(255).byte()
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    sources = {"shapes (drawn)": "shapes"}
    for form in ("png", "jpg"):
        contents = [encoded(image, form) for image in pixels]
        (folder / form).mkdir()
        with zipfile.ZipFile(folder / f"{form}.zip", "w") as archive:
            for number, content in enumerate(contents):
                (folder / form / f"{number:06}.{form}").write_bytes(content)
                archive.writestr(f"{number:06}.{form}", content)
        pq.write_table(pa.table({"image": contents}), folder / f"{form}.parquet", row_group_size=1000)
        sources |= {
            f"folder of {form}": str(folder / form),
            f"zip of {form}": str(folder / f"{form}.zip"),
            f"parquet of {form}": str(folder / f"{form}.parquet"),
        }
    np.savez_compressed(folder / "images.npz", images=pixels)
    return sources | {".npz": str(folder / "images.npz")}


def encoded(image: object, form: str) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, {"png": "PNG", "jpg": "JPEG"}[form])  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()
