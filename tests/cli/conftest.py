import pytest

from jkvq.models.formats.converted_folder import write_converted
from tests.tiny import CONFIG


@pytest.fixture(scope="package")
def model(tiny, tmp_path_factory):
    """The folder of a tiny model."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_converted(path, CONFIG, tiny.params, tiny.tokenizer)
    return str(path)


@pytest.fixture(scope="package")
def text(tmp_path_factory):
    """The file of a text of some thousand tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"The fox jumps over {i} lazy dogs." for i in range(300)))
    return str(path)
