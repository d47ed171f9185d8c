import sys

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_struct.utilities.checks import EXTRA_OF, require


def missing(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # an import of it raises ModuleNotFoundError


def test_package_that_is_there_is_no_error():
    require("matplotlib", "A plot")


@pytest.mark.parametrize(("package", "extra"), EXTRA_OF.items())
def test_missing_package_names_what_needs_it_and_the_extra(package, extra, monkeypatch):
    missing(package, monkeypatch)
    commands = rf"pip install 'lightning-struct\[{extra}\]' \(in a checkout: pip install '.\[{extra}\]'\)"
    message = rf"^A plot needs {package}, .*Remedy: {commands}$"
    with pytest.raises(MisconfigurationException, match=message):
        require(package, "A plot")


def test_other_remedies_are_listed(monkeypatch):
    missing("torchvision", monkeypatch)
    with pytest.raises(MisconfigurationException, match=r"Remedies:\n  - pip install .*\n  - bring your own$"):
        require("torchvision", "A plot", ["bring your own"])


def test_broken_package_says_how_it_broke(monkeypatch, tmp_path):
    (tmp_path / "torchtext.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchtext", raising=False)
    with pytest.raises(MisconfigurationException, match=r"\(OSError: undefined symbol\)"):
        require("torchtext", "A plot")
