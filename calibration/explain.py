"""An artefact in words."""

import numpy as np

from jkvq.cache.calibrated import SideCalibration, methods_for
from jkvq.cache.specs.presets import PRESETS
from jkvq.calibration.artefact import Artefact
from jkvq.calibration.solve import Spectra


def explain(artefact: Artefact) -> list[str]:
    """What an artefact holds, where it comes from and what it serves."""
    manifest = artefact.manifest
    serves = [
        name for name, preset in PRESETS.items() if manifest.method in methods_for(preset.spec)
    ]
    changed = ", ".join(f"{name}={value}" for name, value in manifest.options.items())
    sink, recent, page = (manifest.windows[name] for name in ("sink", "recent", "page"))
    lines = [
        f"Calibration of {manifest.model} (weights {manifest.weights[:12]}; {manifest.layers} "
        f"layers, {manifest.kv_heads} KV heads of {manifest.head_dim}) by method {manifest.method}"
        + (f" with {changed}." if changed else "."),
        f"Made on the first {manifest.tokens:,} tokens of {manifest.corpus} (sha256 "
        f"{manifest.corpus_sha256[:12]}) with "
        + ", ".join(f"{name} {number}" for name, number in manifest.versions.items())
        + ".",
        f"Caches with windows: made for the first {sink} and the {recent} most recent "
        f"tokens, and pages of {page}.",
        f"Serves {', '.join(serves) or _unnamed(manifest.method)}.",
    ]
    if learned := manifest.learned:
        from_there = ", going on from another" if "learn_from" in manifest.options else ""
        lines.append(
            f"Learned for {manifest.options['learn_for']}{from_there}: KL "
            f"{learned['start_kl']:.3g} before and "
            f"{learned['kl']:.3g} after step {learned['step']:.0f}, on windows that were held out."
        )
    lines += [f"Tuned: {name} is {text}." for name, text in manifest.caches.items()]
    for name, side, spectra in (
        ("keys", artefact.calibration.key, artefact.key),
        ("values", artefact.calibration.value, artefact.value),
    ):
        lines += [f"{name}: {line}" for line in _explain_side(side, spectra)]
    return lines


def _unnamed(method: str) -> str:
    """What an artefact serves whose method no preset asks for."""
    if method.startswith("kmeans"):
        return f"k-means caches with its number, as kmeans16-int4,centroids={method[6:]}"
    return "any cache with center=true"


def _explain_side(side: SideCalibration, spectra: Spectra) -> list[str]:
    lines = []
    mean = side.all_tokens.mean
    if mean is not None:
        per_layer = np.linalg.norm(mean, axis=-1).mean(-1)
        lines.append(
            f"means of norm {per_layer.min():.3g} (layer {per_layer.argmin()}) to "
            f"{per_layer.max():.3g} (layer {per_layer.argmax()})."
        )
    if spectra.eigenvalues is not None:
        values = np.maximum(spectra.eigenvalues, 0)
        share = values[..., : max(1, values.shape[-1] // 8)].sum(-1) / values.sum(-1)
        lines.append(
            f"a rotation for each head; the first eighth of the target's directions holds "
            f"{share.min():.0%} to {share.max():.0%} of it, {share.mean():.0%} on average."
        )
    if spectra.energy_before is not None and spectra.energy_after is not None:
        before, after = (
            (energy.max(-1) / energy.mean(-1)).mean()
            for energy in (spectra.energy_before, spectra.energy_after)
        )
        lines.append(
            f"the strongest channel of a head has {before:.1f} times the mean energy before the "
            f"rotation and {after:.1f} times after it, on average."
        )
    if side.clip is not None:
        chosen, counts = np.unique(side.clip, return_counts=True)
        listed = ", ".join(f"{c:.2f} in {n}" for c, n in zip(chosen, counts, strict=True))
        lines.append(f"clip ratios by layer: {listed}.")
    if side.centroids is not None:
        lines.append(f"{side.centroids.shape[1]} centroids in each layer.")
    if side.widths is not None:
        for bits in (2, 3, 4):
            widths = side.widths[bits - 1]
            share = ", ".join(
                f"{(widths == w).mean():.0%} of {w}" for w in range(1, 9) if (widths == w).any()
            )
            lines.append(f"block widths at {bits} bits on average: {share}.")
    return lines
