"""The PNG and SVG of a layout: what colour each tile and token has, what is said, what is refused."""

import re
import subprocess
import sys
import tracemalloc
from html import escape
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib as mpl
import matplotlib.image
import numpy as np
import pytest
from support.lowering import brute

import frisket as fk
from frisket.dsl.errors import BackendError, ParameterError
from frisket.runtime.cli.main import main
from frisket.runtime.draw.pixels import DARK, LIGHT, PANELS, of_tiles, panels, png, rgb
from frisket.runtime.machine.modules import pip_install

WINDOW = fk.mask("causal & window(w)", w=256)


def colours_at(figure, path, queries, keys, panel=0):
    """The pixels of the file under these positions of one picture, `#rrggbb` [queries, keys]."""
    picture = np.rint(mpl.image.imread(path)[..., :3] * 255).astype(int)
    axes = figure.axes[panel]
    y = np.array([axes.transData.transform((0, q))[1] for q in queries])
    x = np.array([axes.transData.transform((k, 0))[0] for k in keys])
    found = picture[(picture.shape[0] - y).astype(int)[:, None], x.astype(int)]
    return np.vectorize("#{:02x}{:02x}{:02x}".format)(*np.moveaxis(found, -1, 0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(
    ("shape", "block", "text"),
    [
        ((1024, 1024), (128, 128), "causal & window(256)"),
        ((700, 1000), (64, 128), "abs(q - k) < 200 | k < 50"),
        ((3000, 500), (128, 100), "q // 400 == k // 100"),
    ],
)
def test_plotted_tiles_have_the_colour_of_their_kind(tmp_path, dark, shape, block, text):
    mask = fk.mask(text)
    figure = mask.layout(*shape, block=block).plot(tmp_path / "m.png", tokens=False, dark=dark)
    kinds = brute.kinds(mask.expr, *shape, block=block)[0, 0]
    middles = [(np.arange(0, n, b) + np.minimum(np.arange(0, n, b) + b, n)) / 2 for n, b in zip(shape, block)]
    p = DARK if dark else LIGHT
    found = colours_at(figure, tmp_path / "m.png", *middles)
    np.testing.assert_array_equal(found, np.array([p.empty, p.partial, p.full])[kinds])


def test_small_masks_show_their_tokens(tmp_path):
    mask = fk.mask("causal & (window(40) | sinks(3))")
    figure = mask.layout(100, 90, block=(16, 8)).plot(tmp_path / "m.png")
    kinds = brute.kinds(mask.expr, 100, 90, block=(16, 8))[0, 0].repeat(16, 0).repeat(8, 1)[:100, :90]
    seen = mask.dense(100, 90)[0, 0]
    p = LIGHT
    want = np.where(kinds == 1, np.where(seen, p.partial, p.tint), np.where(kinds == 2, p.full, p.empty))
    found = colours_at(figure, tmp_path / "m.png", np.arange(100) + 0.5, np.arange(90) + 0.5)
    # the lines between tiles fall on the first pixels of a tile: look where there are none
    inner = np.ix_(np.arange(100) % 16 > 0, np.arange(90) % 8 > 0)
    np.testing.assert_array_equal(found[inner], want[inner])
    assert {p.partial, p.tint, p.empty, p.full} == set(want.flat)
    (axes,) = figure.axes
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 90), (100, 0))
    box = axes.get_window_extent()
    assert (box.width, box.height) == pytest.approx((90 * 7, 100 * 7))  # a token is 7 pixels, in whole ones


@pytest.mark.parametrize("origin", [0, 5])
def test_partial_tiles_show_their_inside(origin):
    """A cell of several tokens is the deeper, the more of its pairs are visible; the last ones are cut."""
    layout = fk.mask("causal & (window(70) | sinks(3))").layout(1000, 900, block=(64, 96), origin=(0, 0, origin, 0))
    (panel,) = panels(layout, LIGHT, [0], [0], fine=4, cells=512, most=1)
    assert (panel.step, panel.tiles, panel.colours.shape) == ((4, 4), (0, 0), (250, 225, 3))
    dense = fk.mask(f"q + {origin} >= k & (abs(q + {origin} - k) < 70 | k < 3)").dense(1000, 900)[0, 0]
    kinds = layout.kinds()[0, 0].repeat(16, 0).repeat(24, 1)[:250, :225]
    share = dense.reshape(250, 4, 225, 4).mean((1, 3))[..., None]
    want = np.array([rgb(LIGHT.empty), rgb(LIGHT.tint), rgb(LIGHT.full)])[kinds]
    want = np.where(kinds[..., None] == 1, rgb(LIGHT.tint) * (1 - share) + rgb(LIGHT.partial) * share, want)
    assert np.abs(panel.colours - want).max() <= 0.51
    assert len({*np.unique(share)}) > 4


def test_long_masks_are_drawn_by_tile():
    assert "One dot" in words(fk.mask("causal").layout(4096, 4096).plot())
    assert "partial: visible" not in words(fk.mask("causal").layout(4096, 8192).plot())
    assert "partial: visible" not in words(fk.mask("causal & window(64 << h)").layout(4096, 4096, heads=2).plot())


def words(figure):
    return "\n".join(text.get_text() for text in figure.texts)


def test_plot_states_mask_sizes_and_counts(tmp_path):
    figure = WINDOW.layout(1024, 1024).plot()
    assert words(figure) == "\n".join(
        [
            "causal & window(w)",
            "1,024 × 1,024 tokens in tiles of 128 × 128",
            "full tile",
            "partial: visible",
            "hidden",
            "empty tile",
            "7 full, 14 partial, 43 empty tiles; 32.8 % are read",
            "One dot shows 2 × 2 tokens; in partial tiles, deeper where more are",
            "visible.",
        ]
    )
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == [str(128 * i) for i in range(8)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("keys", "queries")
    assert "my mask" in words(WINDOW.layout(1024, 1024).plot(title="my mask"))


def test_long_title_wraps_and_is_never_cut():
    mask = fk.mask("causal | natten3d(8, 24, 32, 3, 5, 5)")
    assert words(mask.layout(256, 256).plot()).startswith(f"{mask}\n256 × 256 tokens")
    formula = fk.mask(mask.expanded).layout(256, 256)
    for said in (words(formula.plot()), words(mask.layout(256, 256).plot(title=mask.expanded))):
        title = said.partition("\n256 × 256 tokens")[0]
        assert title.count("\n") >= 6
        assert title.replace("\n", " ") == mask.expanded
    page = formula.to_html()
    assert page.count(escape(mask.expanded)) >= 2  # its title, and the still picture
    assert "…" not in page.partition("<script")[0]


def test_axes_are_global_positions():
    figure = WINDOW.layout(256, 512, origin=(0, 0, 768, 512), sizes=(1, 1, 1024, 1024)).plot()
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["768", "896"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["512", "640", "768", "896"]


def test_many_tiles_are_drawn_as_fewer_and_it_says_so(tmp_path):
    mask = fk.mask("causal & (window(16384) | (q - k) % 4096 < 512 | sinks(1000))")
    layout = mask.layout(1 << 19, 1 << 19)
    figure = layout.plot(tmp_path / "m.png")
    assert "One cell shows 8 × 8 tiles: full or empty where all of them are" in words(figure).replace("\n", " ")
    # the middle of the window is full, far above the diagonal is empty
    found = colours_at(figure, tmp_path / "m.png", [300_000], [292_000, 500_000, 100])
    assert list(found[0, :2]) == [LIGHT.full, LIGHT.empty]
    assert found[0, 2] not in (LIGHT.full, LIGHT.empty)


def test_cells_of_several_tiles():
    mask = fk.mask("causal & (k < 900 | (q - k) % 64 < 8)")
    layout = mask.layout(3000, 2000, block=(8, 4))
    panel = of_tiles(layout, LIGHT, cells=64)
    kinds = layout.kinds()[0, 0]
    assert panel.tiles == (6, 8)
    for (i, j), colour in np.ndenumerate(
        np.vectorize("#{:02x}{:02x}{:02x}".format)(*np.moveaxis(panel.colours, -1, 0))
    ):
        cell = kinds[6 * i : 6 * i + 6, 8 * j : 8 * j + 8]
        if (cell == 2).all():
            assert colour == LIGHT.full
        elif not cell.any():
            assert colour == LIGHT.empty
        else:
            want = rgb(LIGHT.tint) + (rgb(LIGHT.partial) - rgb(LIGHT.tint)) * (cell > 0).mean()
            assert np.abs(rgb(colour) - want).max() <= 0.5


def test_different_slices_side_by_side():
    layout = fk.mask("causal & window(40 * (h + 1))").layout(300, 300, batch=2, heads=3, block=(32, 32))
    figure = layout.plot()
    assert [axes.get_title() for axes in figure.axes] == [
        f"batch 0, head {h} (1 more looks the same)" for h in range(3)
    ]
    assert "Drawn" not in words(figure)
    assert len(layout.plot(h=1).axes) == 1


@pytest.mark.parametrize("axis", ["b", "h"])
def test_slices_that_differ_only_within_tiles(axis):
    layout = fk.mask(f"causal & (k + {axis}) % 2 == 0").layout(64, 64, batch=2, heads=2, block=(32, 32))
    assert len(layout.spans.count) == 1
    assert len(layout.plot().axes) == 2
    assert len(layout.plot(tokens=False).axes) == 1


def test_plot_draws_at_most_six_heads():
    figure = fk.mask("causal & window(8 * h + 8)").layout(1024, 1024, heads=20, block=(8, 8)).plot()
    assert len(figure.axes) == PANELS
    assert "Drawn: 6 of 20 batch entries and heads; choose others with b and h." in words(figure)


def test_compact_is_tiles_alone():
    figure = fk.mask("causal").layout(64, 64, block=(8, 8)).plot(compact=True)
    assert words(figure) == ""
    assert max(figure.get_size_inches()) < 2


def test_a_budget_that_ran_out_is_said():
    layout = fk.mask("(q * q + k * k) % 1001 < 2").layout(640, 640, block=(64, 64), exact=False)
    assert not layout.exact
    assert "the budget of the analysis ran out" in words(layout.plot()).replace("\n", " ")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_equal_layouts_give_equal_bytes(tmp_path, suffix):
    layout = fk.mask("causal & window(20)").layout(64, 64, block=(16, 16))
    layout.plot(tmp_path / f"a.{suffix}")
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.hashsalt": "other"}):
        layout.plot(tmp_path / f"b.{suffix}")
    one, other = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in "ab")
    assert one == other
    assert b"Software" not in one
    assert b"dc:date" not in one


def test_svg_is_xml(tmp_path):
    layout = fk.mask("causal & k > -1").layout(64, 64, block=(16, 16))
    layout.plot(tmp_path / "m.svg", title="</svg> &\x1b[1m \x00\ud800\ufffe<b>")
    root = ElementTree.fromstring((tmp_path / "m.svg").read_bytes())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not root.findall(".//{http://purl.org/dc/elements/1.1/}date")


def luminance(colour):
    """Relative luminance (WCAG 2.2)."""
    c = rgb(colour) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_kinds_are_apart_in_greyscale(palette):
    ladder = [float(luminance(c)) for c in (palette.full, palette.partial, palette.tint, palette.empty)]
    assert ladder in (sorted(ladder), sorted(ladder, reverse=True))
    contrast = [(max(a, b) + 0.05) / (min(a, b) + 0.05) for a, b in pairwise(ladder)]
    assert min(contrast) > 1.5
    for text in (palette.ink, palette.dim):  # AA of WCAG
        a, b = luminance(text), luminance(palette.paper)
        assert (max(a, b) + 0.05) / (min(a, b) + 0.05) > 4.5


# Simulations at full strength by Machado, Oliveira, Fernandes, "A physiologically-based model for simulation of
# color vision deficiency", 2009, on linear RGB.
VISION = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_kinds_are_apart_for_every_vision(palette, vision):
    def seen(colour):
        c = rgb(colour) / 255
        linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
        return np.clip(np.array(VISION[vision]) @ linear, 0, 1) ** (1 / 2.2)

    kinds = [seen(c) for c in (palette.full, palette.partial, palette.tint, palette.empty)]
    far = [np.linalg.norm(a - b) for i, a in enumerate(kinds) for b in kinds[:i]]
    assert min(far) > 0.2


def test_memory_follows_the_picture():
    layout = fk.mask("causal & window(4096)").layout(1 << 20, 1 << 20)
    _ = layout.runs
    tracemalloc.start()
    of_tiles(layout, LIGHT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6  # 8192 x 8192 tiles would be 67 MB as bytes


def test_a_png_of_our_own(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    (tmp_path / "m.png").write_bytes(png(colours))
    np.testing.assert_array_equal(np.rint(mpl.image.imread(tmp_path / "m.png") * 255), colours)


def test_pyplot_is_left_alone():
    code = (
        "import sys, frisket as fk; fk.mask('causal').layout(64, 64).plot(); print('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# -- refusals -----------------------------------------------------------------------------------------------


def refused(call, *said):
    with pytest.raises(ParameterError) as error:
        call()
    assert str(error.value) == "".join(said)


def test_plot_refuses_bad_names_and_sizes(tmp_path):
    layout = WINDOW.layout(1024, 1024)
    refused(lambda: layout.plot("m.jpg"), "cannot draw 'm.jpg': name it .png or .svg; for a page there is `to_html`")
    refused(lambda: layout.plot(h=3), "h=3 is outside the 1 there are")
    refused(lambda: layout.plot(size=0.01), "size=0.01, dpi=150 leaves 1 pixels: a picture needs 16")
    refused(
        lambda: layout.plot(tokens=True),
        "tokens=True draws at most 262,144 positions, one pixel each or more; these are 1,048,576 in 750 pixels a "
        "side\n  lay out a part with `origin` and `sizes`, give a larger `size`, or see `to_html`",
    )
    path = tmp_path / "nowhere" / "m.png"
    refused(lambda: layout.plot(path), f"cannot write {path}: No such file or directory")


def test_plot_leaves_no_partial_file(tmp_path):
    (tmp_path / "m.png").mkdir()
    refused(
        lambda: WINDOW.layout(64, 64).plot(tmp_path / "m.png"), f"cannot write {tmp_path / 'm.png'}: Is a directory"
    )
    assert [f.name for f in tmp_path.iterdir()] == ["m.png"]


def test_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        BackendError, match="^" + re.escape(f"matplotlib is not installed: {pip_install('plot')}") + "$"
    ):
        WINDOW.layout(64, 64).plot()


# -- the command ----------------------------------------------------------------------------------------------


def test_plot_command_writes_png_svg_and_html(tmp_path, capsys):
    for name in ("m.png", "m.svg", "m.html"):
        assert main(["plot", "causal & window(w)", "--set", "w=100", "--q-len", "512", "-o", str(tmp_path / name)]) == 0
        path = tmp_path / name
        assert capsys.readouterr().out == (
            f"written   {path}, {path.stat().st_size / 1000:.3g} kB\n"
            "tiles     █ 0 full: every pair is visible, read without the mask\n"
            "          ▒ 7 partial: read with the mask\n"
            "          · 9 empty: never read\n"
        )
    assert sorted(f.name for f in tmp_path.iterdir()) == ["m.html", "m.png", "m.svg"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["causal", "-o", "m.gif"], "ParameterError: cannot write 'm.gif': name it .png, .svg or .html"),
        (["causal", "-o", "nowhere/m.html"], "ParameterError: cannot write nowhere/m.html: No such file or directory"),
        (["alibi", "-o", "m.png"], "ParameterError: this score mod hides nothing, so there are no tiles to draw"),
        (["causal", "-o", "m.html", "--h", "0"], "ParameterError: --b, --h, --dark and --title are for .png"),
        (["causal", "-o", "m.png", "--h", "1"], "ShapeError: --h 1 is outside the 1 there are"),
        (["causal & window(w)", "-o", "m.png"], "ParameterError: `w` has no value; give it: --set w=VALUE"),
    ],
)
def test_bad_plot_commands_write_no_file(tmp_path, monkeypatch, capsys, argv, said):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", *argv]) == 2
    assert capsys.readouterr().err.startswith(said)
    assert not list(tmp_path.iterdir())
