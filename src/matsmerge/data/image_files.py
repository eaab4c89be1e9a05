"""Images: in folders, in bytes, as arrays."""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from matsmerge.data.row_problems import describe_value
from matsmerge.errors import DataError
from matsmerge.optional_import import import_optional

_MAX_PIXELS = 2**26  # 67 megapixels, which take 268 MB

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


def read_image_folder(folder: Path) -> list[dict[str, Any]]:
    """A row per image, in the order of the classes' and the files' names; the label is a name."""
    return [
        {"image": f"{entry.name}/{file.name}", "label": entry.name}
        for entry in sorted(folder.iterdir())
        if entry.is_dir()
        for file in sorted(entry.iterdir())
        if file.name.lower().endswith(IMAGE_SUFFIXES)
    ]


def contained_file(folder: Path, name: str) -> Path | None:
    """`folder/name`, or None if that leads out of the folder."""
    path = folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # names that cannot be those of files
        return None
    return path if inside else None


def image_source(value: Any, folder: Path | None) -> Any:
    """What an image can be opened from: a path, bytes, an image of PIL or an array.

    Text is a path relative to the folder, and never leads out of it.
    """
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, str):
        path = None if folder is None else contained_file(folder, value)
        if path is None:
            raise DataError(
                f"image '{value}': expected a path inside of the data's folder {folder or ''}"
            )
        return path
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, Path) or hasattr(value, "convert"):
        return value
    if isinstance(value, (list, tuple)) or hasattr(value, "__array__"):
        return _checked_array(value)
    raise DataError(
        f"'image': expected a path, bytes, an image of PIL or an array, "
        f"found {describe_value(value)}"
    )


def check_image(source: Any) -> None:
    """Refuse what is no image, without decoding it."""
    if isinstance(source, (Path, bytes)):
        with _opened(source) as image:
            image.verify()


def open_image(source: Any, mode: str) -> Any:
    """The image itself, in a mode of PIL (`RGB`, `L`)."""
    if isinstance(source, np.ndarray):
        source = import_optional("PIL.Image").fromarray(source)
    if not isinstance(source, (Path, bytes)):
        return source.convert(mode)
    with _opened(source) as image:
        return image.convert(mode)


@contextmanager
def _opened(source: Path | bytes) -> Iterator[Any]:
    """Open an image without decoding it; errors in the `with` block name its source."""
    library = import_optional("PIL.Image")
    name = str(source) if isinstance(source, Path) else f"image of {len(source)} bytes"
    if isinstance(source, Path) and not source.is_file():
        raise DataError(f"{source}: no such file")
    size = "too many"
    try:
        with warnings.catch_warnings():
            # PIL warns of what it only refuses at twice the size.
            warnings.simplefilter("ignore", library.DecompressionBombWarning)
            opened = library.open(source if isinstance(source, Path) else io.BytesIO(source))
        with opened as image:
            if image.width * image.height > _MAX_PIXELS:
                size = f"{image.width} x {image.height}"
                raise library.DecompressionBombError
            yield image
    except library.DecompressionBombError as error:
        raise DataError(
            f"{name}: an image of {size} pixels, expected at most {_MAX_PIXELS:,}; make it smaller"
        ) from error
    except Exception as error:  # each format has its own way to be damaged
        raise DataError(f"{name}: not a readable image ({error})") from error


def _checked_array(value: Any) -> Any:
    """(height, width) or (height, width, 3), of whole numbers from 0 to 255."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(
            f"'image': expected an array, found rows of different sizes ({error})"
        ) from error
    if array.dtype.kind not in "iu" or array.size == 0 or array.min() < 0 or array.max() > 255:
        raise DataError(
            "'image': expected an array of whole numbers from 0 to 255, found "
            f"{array.dtype} of shape {list(array.shape)}"
        )
    array = array.astype(np.uint8)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = array.transpose(1, 2, 0)  # channels first
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 and (array.ndim != 3 or array.shape[2] != 3):
        raise DataError(
            "'image': expected an array (height, width) or (height, width, 3), found "
            f"{list(array.shape)}"
        )
    return np.ascontiguousarray(array)
