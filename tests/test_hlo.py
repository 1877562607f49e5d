"""Collectives read from the text of a program: types, groups, axes, pairs, branches, legs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from test_report import abstract

from onebit_zero_jax import hlo, wire_report

P = jax.P


def one(line, axes, partitions=None, before=""):
    """The collectives of a program of one line (and what stands before it)."""
    n = partitions or abstract(axes).size
    text = (
        f"HloModule f, is_scheduled=true, num_partitions={n}\n\n"
        f"ENTRY %main (...) -> ... {{\n{before}  {line}\n}}\n"
    )
    return wire_report(text, abstract(axes)).collectives


def test_types_and_their_bytes():
    found = hlo.arrays_of(
        "(f32[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/bf16[5], pred[], u8[7]{0:T(4,128)(4,1)}, "
        "s4[3], f8e4m3fn[6], c64[2], u32[]{:S(2)}, token[], f32[<=4,2])"
    )
    assert [a.bytes for a in found] == [24, 10, 1, 7, 2, 6, 16, 4, 32]


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,1},{2,3}}, x=1", [(0, 1), (2, 3)]),
        ("replica_groups=[4,2]<=[8], x", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("replica_groups=[2,4]<=[4,2]T(1,0), x", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (
            "replica_groups=[4,2]<=[2,2,2]T(1,2,0), x",
            [(0, 4), (1, 5), (2, 6), (3, 7)],
        ),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", [(0, 2), (1, 3)]),
        ("replica_groups=mesh[a=2,b=2] {b}, x", [(0, 1), (2, 3)]),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'c', 'a'}, x", [(0, 2, 1, 3)]),
        (
            "replica_groups=mesh['x'=2,'y'=4], device_ids=([2,2,2]T(1,0,2)) {'y'}, x",
            [(0, 1, 4, 5), (2, 3, 6, 7)],
        ),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['x'=8] {'x':(2)2}, x", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("replica_groups={}, x", None),
        ("dimensions={0}", None),
        ("source_target_pairs={{0,1},{1,0}}", [(0, 1), (1, 0)]),
    ],
)
def test_groups(text, groups):
    assert hlo.groups(text) == groups


def test_unknown_notation_of_groups_raises():
    for text in ("@mesh<x=2>{x}", "mesh['x'=2] {'y'}", "mesh['x'=8] {'x':(1)2, 'x':(4)2}"):
        with pytest.raises(ValueError, match="unknown notation of replica groups"):
            hlo.groups(f"channel_id=1, replica_groups={text}")


def test_groups_of_automatic_sharding():
    """Named axes of a mesh of XLA's own, of another order than the user's."""
    names = ("a", "b", "c")
    kinds = (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), names, kinds, devices=jax.devices()[:8])
    place = lambda *spec: jax.NamedSharding(mesh, P(*spec))
    f = jax.jit(
        lambda x, w: x @ w,
        in_shardings=(place("b", ("a", "c")), place(("a", "c"), None)),
        out_shardings=place(("b", "c")),
    )
    compiled = f.lower(jnp.ones((16, 64)), jnp.ones((64, 32))).compile()
    assert "replica_groups=mesh[" in compiled.as_text()
    report = wire_report(compiled, mesh)
    assert report.collectives
    assert {axis for c in report.collectives for axis in c.across} == {"a", "c"}


MESH = {"slow": 2, "fast": 4}
IDS = "channel_id=1, use_global_device_ids=true, "


@pytest.mark.parametrize(
    "line, sent, across",
    [
        # All-reduce, 2 (p - 1) / p of 64 bytes; groups along either axis, in both notations.
        (
            f"%r = f32[16] all-reduce(%x), {IDS}replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}",
            64,
            {"slow": 64},
        ),
        (f"%r = f32[16] all-reduce(%x), {IDS}replica_groups=[2,4]<=[8]", 96, {"fast": 96}),
        (
            f"%r = f32[16] all-reduce(%x), {IDS}replica_groups=[4,2]<=[2,4]T(1,0)",
            64,
            {"slow": 64},
        ),
        # Over both: of 7 chunks, 1 crosses the slow axis and 2 x 3 the fast one.
        (
            f"%r = f32[16] all-reduce(%x), {IDS}replica_groups=[1,8]<=[8]",
            112,
            {"slow": 16, "fast": 96},
        ),
        # The order within the group is that of the chunks.
        (
            f"%r = u8[64] all-gather(%x), {IDS}replica_groups=[1,8]<=[2,4]T(1,0)",
            56,
            {"slow": 8, "fast": 48},
        ),
        (f"%r = f32[16] reduce-scatter(%x), {IDS}replica_groups=[2,4]<=[8]", 192, {"fast": 192}),
        # Pieces to 7 others; 4 of them lie across the slow axis.
        (
            "%r = u8[8,7] all-to-all(%x), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}",
            49,
            {"slow": 28, "fast": 21},
        ),
        (
            "%r = (u8[1,7], u8[1,7]) all-to-all(%x, %y), channel_id=1, "
            "replica_groups={{0,4},{1,5},{2,6},{3,7}}",
            7,
            {"slow": 7},
        ),
        (
            "%r = bf16[8] collective-permute(%x), channel_id=1, "
            "source_target_pairs={{0,1},{1,0},{2,6}}",
            16,
            {"slow": 16, "fast": 16},
        ),
        # A permutation that XLA on GPU turned into a send and a receive.
        (
            "%r = (bf16[8], u32[], token[]) send(%x, %t), channel_id=1, frontend_attributes="
            '{_xla_send_recv_source_target_pairs="{{0,4},{4,0}}"}',
            16,
            {"slow": 16},
        ),
        # Over replicas, all partitions together; and over all devices by default.
        (f"%r = f32[16] all-reduce(%x), {IDS}replica_groups={{}}", 112, {"slow": 16, "fast": 96}),
        (
            "%r = f32[16] all-reduce(%x), channel_id=1, replica_groups={{0}}",
            112,
            {"slow": 16, "fast": 96},
        ),
    ],
)
def test_bytes_and_axes(line, sent, across):
    (c,) = one(line, MESH)
    assert c.sent == pytest.approx(sent, abs=1e-9)
    assert c.across == pytest.approx(across)
    assert c.asynchronous == ("send(" in line)


def test_no_traffic_in_groups_of_one():
    assert not one(f"%r = f32[4] all-reduce(%x), {IDS}replica_groups=[8,1]<=[8]", MESH)
    assert not one("%r = f32[4] all-reduce(%x), replica_groups={{0}}", MESH)


def test_merged_all_reduce_by_leg():
    line = (
        f"%r = (f32[66]{{0}}, f32[100]{{0}}, pred[]) all-reduce(%a, %b, %c), {IDS}"
        "replica_groups=[1,8]<=[8], metadata={op_name="
        '"jit(f)/(dense_leaves/psum:metrics/psum:metrics/psum)"}'
    )
    found = one(line, MESH)
    assert [(c.dtype, c.leg, c.size) for c in found] == [
        ("f32", "dense_leaves", 66),
        ("f32", "metrics", 100),
        ("pred", "metrics", 1),
    ]
    assert {c.instruction for c in found} == {"r"}
    (c,) = one(line.replace("(dense_leaves/psum:metrics/psum:metrics/psum)", "weights/psum"), MESH)[
        :1
    ]
    assert (c.leg, c.size, c.leg_inferred) == ("weights", 166, False)


def test_names_are_scopes_not_parts_of_words():
    (c,) = one(
        f"%r = f32[8] all-reduce(%a), {IDS}replica_groups=[1,8]<=[8], "
        "metadata={op_name=\"jit(f)/params['weights']/my_metrics/psum\"}",
        MESH,
    )
    assert c.leg == "other"


def test_asynchronous_pairs_count_once():
    found = one(
        "%done = (u8[2], u8[16]) all-gather-done(%start)",
        MESH,
        before=(
            "  %start = ((u8[2], u8[2]), (u8[16], u8[16])) all-gather-start(%a, %b), "
            f"{IDS}replica_groups=[1,8]<=[8]\n"
            "  %gte = f32[2] get-tuple-element(%z), index=0\n"
            "  %work = f32[2,2] fusion(%gte), kind=kLoop, calls=%nothing\n"
            '  %gemm = f32[2,2] custom-call(%work), custom_call_target="__cublas$gemm"\n'
        ),
    )
    # The text lies about the first result's size on purpose: the end of the pair counts.
    ((sent, pair, between),) = [(c.sent, c.asynchronous, c.overlapped) for c in found]
    assert (sent, pair, between) == (7 / 8 * 18, True, 2)
    (c,) = one(
        "%done = f32[2] async-done(%start)",
        {"data": 2},
        before=("  %start = ((f32[4]), f32[2], u32[]) async-start(%a), calls=%wrapped\n"),
    ) or [None]
    assert c is None  # Nothing inside: the computation is not there.


def test_wrapped_asynchronous_collective():
    text = """HloModule f, is_scheduled=true, num_partitions=2

%wrapped (p: f32[4]) -> f32[2] {
  %p = f32[4] parameter(0)
  ROOT %rs = f32[2] reduce-scatter(%p), channel_id=1, replica_groups={{0,1}}, \
use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(f)/reduce_leg/rs"}
}

ENTRY %main (a: f32[4]) -> f32[2] {
  %start = ((f32[4]), f32[2], u32[]) async-start(%a), calls=%wrapped
  %dot = f32[2,2] dot(%b, %b)
  ROOT %done = f32[2] async-done(%start)
}
"""
    (c,) = wire_report(text, abstract({"data": 2})).collectives
    assert (c.op, c.sent, c.leg, c.asynchronous, c.overlapped) == (
        "reduce-scatter",
        8.0,
        "reduce",
        True,
        1,
    )


@pytest.mark.parametrize("names, numbers", [(("", ""), [1, 0]), (("0", "1"), [0, 1])])
def test_branches_have_the_numbers_of_jax(names, numbers):
    """Those of the name stack if it has any, in case XLA turned the predicate round."""

    def branch(name, number):
        scope = f"cond/branch_{number}_fun/" if number else ""
        return f"""
%{name} (p: f32[4]) -> f32[4] {{
  %p = f32[4] parameter(0)
  ROOT %r = f32[4] all-reduce(%p), {IDS}replica_groups=[1,2]<=[2], metadata={{op_name="{scope}x"}}
}}
"""

    text = f"""HloModule f, is_scheduled=true, num_partitions=2
{branch("first", names[0])}{branch("second", names[1])}
ENTRY %main (c: pred[], a: f32[4]) -> f32[4] {{
  %c = pred[] parameter(0)
  %a = f32[4] parameter(1)
  ROOT %if = f32[4] conditional(%c, %a, %a), true_computation=%first, false_computation=%second
}}
"""
    found = wire_report(text, abstract({"data": 2})).collectives
    assert [c.branch for c in found] == [(("if", n),) for n in numbers]
