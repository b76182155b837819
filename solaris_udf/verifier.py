"""The verifier: the small model that says how likely a pair is to be scored in the next window, and how often.

Trained with torch (verifier_training.py), scored with numpy alone in float64: a network this small gains nothing from
torch, a Python worker starts without importing it, and float64 makes the result independent of how rows are batched.

A model is a folder: weights.safetensors and, written last, model.json (features, scaling, calibration, hash of the
weights).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from solaris_udf.calibration import IDENTITY, Isotonic

FORMAT = 1
WEIGHTS = "weights.safetensors"
DESCRIPTION = "model.json"
BLOCK = 512  # examples at a time: what a layer puts out stays in the processor's cache
DIGITS = 9  # of a score that are kept: what is beyond is noise of the order of additions
Float64 = npt.NDArray[np.float64]


class VerifierError(ValueError):
    """A model folder that is broken, or that does not fit what it is asked to score."""


@dataclass(frozen=True)
class Verifier:
    """A trained verifier. layers: (weight [out, in], bias [out]) per layer, the last one with two outputs."""

    features: tuple[str, ...]
    window_hours: float
    mean: Float64
    scale: Float64
    layers: tuple[tuple[Float64, Float64], ...]
    calibration: Isotonic = IDENTITY
    excess: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)

    def raw(self, values: npt.ArrayLike) -> tuple[Float64, Float64]:
        """Uncalibrated (probability [n], expected further rows of a pair that is scored at least once [n]).

        values: features [n, f] in the order of `features`, all finite. Raises VerifierError for another shape or a NaN.
        """
        values = np.asarray(values, dtype=np.float64)
        if values.ndim != 2 or values.shape[1] != len(self.features):
            raise VerifierError(f"values must be [n, {len(self.features)}], not {list(values.shape)}")
        if not np.isfinite(values).all():
            bad = [self.features[column] for column in np.flatnonzero(~np.isfinite(values).all(axis=0))]
            raise VerifierError(f"features are not finite: {', '.join(bad)}")
        output = np.empty((len(values), 2))
        for start in range(0, len(values), BLOCK):
            output[start : start + BLOCK] = self._output(values[start : start + BLOCK])
        return 0.5 * (1 + np.tanh(output[:, 0] / 2)), np.logaddexp(0.0, output[:, 1])

    def _output(self, values: Float64) -> Float64:
        """The network's two outputs [n, 2]."""
        hidden = prepare(values)
        hidden -= self.mean
        hidden /= self.scale
        for weight, bias in self.layers[:-1]:
            hidden = hidden @ weight.T
            hidden += bias
            np.maximum(hidden, 0.0, out=hidden)
        weight, bias = self.layers[-1]
        output: Float64 = hidden @ weight.T + bias
        return output

    def predict(self, values: npt.ArrayLike) -> tuple[Float64, Float64]:
        """(P(the pair is scored in the window) [n], expected scored rows [n], at least the probability), calibrated."""
        probability, further = self.raw(values)
        calibrated = self.calibration.apply(probability)
        return np.round(calibrated, DIGITS), np.round(calibrated * (1 + self.excess * further), DIGITS)

    def check(self, features: Sequence[str], window_hours: float) -> None:
        """Raises VerifierError that names every difference if the model was trained on other features or another
        window.
        """
        faults = [f"{name} is not computed" for name in self.features if name not in features]
        faults += [f"{name} is unknown to it" for name in features if name not in self.features]
        if not faults and tuple(features) != self.features:
            faults.append("their order differs")
        if self.window_hours != window_hours:
            faults.append(f"its window is {self.window_hours} h, not {window_hours} h")
        if faults:
            raise VerifierError("the verifier does not fit: " + "; ".join(faults) + "; run train_verifier again")


def prepare(values: npt.ArrayLike) -> Float64:
    """The fixed part of the scaling: sign(x) * log(1 + |x|), since counts and hours have long tails."""
    raw = np.asarray(values, dtype=np.float64)
    # log, not log1p, which numpy computes one value at a time; what is lost below 1e-16 no feature has.
    size = np.abs(raw)
    size += 1.0
    np.log(size, out=size)
    return np.copysign(size, raw, out=size)


def save(verifier: Verifier, folder: Path, extra: dict[str, Any] | None = None) -> None:
    """Writes the folder, model.json last and in one rename: a folder without it is not a model."""
    from safetensors.numpy import save as to_bytes

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for place, (weight, bias) in enumerate(verifier.layers):
        tensors[f"layer{place}.weight"], tensors[f"layer{place}.bias"] = weight, bias
    data = to_bytes(tensors)
    description = {
        "format": FORMAT,
        "kind": "verifier",
        "features": list(verifier.features),
        "window_hours": verifier.window_hours,
        "layers": len(verifier.layers),
        "mean": verifier.mean.tolist(),
        "scale": verifier.scale.tolist(),
        "calibration": {
            "x": list(verifier.calibration.x),
            "y": list(verifier.calibration.y),
            "excess": verifier.excess,
        },
        "weights_sha256": hashlib.sha256(data).hexdigest(),
        "metrics": verifier.metrics,
        **(extra or {}),
    }
    (folder / DESCRIPTION).unlink(missing_ok=True)  # a retry must not leave the old description beside new weights
    (folder / WEIGHTS).write_bytes(data)
    part = folder / f".{DESCRIPTION}.part"
    part.write_text(json.dumps(description, indent=1, sort_keys=True), encoding="utf-8")
    part.replace(folder / DESCRIPTION)


def load(folder: Path) -> Verifier:
    """Reads a folder that `save` wrote. Raises VerifierError if a part is missing, broken or not the one described."""
    from safetensors.numpy import load as from_bytes

    try:
        found = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        data = (folder / WEIGHTS).read_bytes()
    except (OSError, json.JSONDecodeError) as error:
        raise VerifierError(f"verifier {folder} can't be read: {error}") from None
    if found.get("kind") != "verifier" or found.get("format") != FORMAT:
        raise VerifierError(
            f"verifier {folder}: kind {found.get('kind')!r}, format {found.get('format')!r} is not "
            f"a verifier of format {FORMAT}"
        )
    if hashlib.sha256(data).hexdigest() != found.get("weights_sha256"):
        raise VerifierError(
            f"verifier {folder}: {WEIGHTS} is not the file that {DESCRIPTION} describes (sha256 differs)"
        )
    try:
        tensors = from_bytes(data)
        table = found["calibration"]
        return Verifier(
            features=tuple(found["features"]),
            window_hours=float(found["window_hours"]),
            mean=np.asarray(found["mean"], dtype=np.float64),
            scale=np.asarray(found["scale"], dtype=np.float64),
            layers=tuple(
                (tensors[f"layer{place}.weight"].astype(np.float64), tensors[f"layer{place}.bias"].astype(np.float64))
                for place in range(int(found["layers"]))
            ),
            calibration=Isotonic(tuple(table["x"]), tuple(table["y"])),
            excess=float(table["excess"]),
            metrics=dict(found["metrics"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise VerifierError(f"verifier {folder}: {DESCRIPTION} is incomplete: {error!r}") from None
