from pathlib import Path

from hasten.cli.settings import main, markdown
from hasten.settings.schema import TABLE

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_up_to_date():
    assert DOCS.read_text(encoding="utf-8") == markdown(), "run `hasten settings > docs/settings.md`"


def test_every_row_is_on_the_page():
    page = markdown()
    for row in TABLE:
        for text in (*row.flags, row.env, row.key):
            assert not text or f"`{text}`" in page, row.name


def test_the_command_prints_the_page(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == markdown()
    assert main(["--frob"]) == 2
    assert "takes no arguments" in capsys.readouterr().err
