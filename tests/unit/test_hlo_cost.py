"""Protects how a compiled TPU program is counted: loops as often as they run, HBM only, the padding of
tiles, updates in place, slices of operands, and a kernel's own estimate."""

from torchtpu.ahead_of_time.hlo import parse
from torchtpu.ahead_of_time.hlo_cost import Cost, read_cost

HEADER = "HloModule step, is_scheduled=true\n\n"
GROUPS = [(0, "other"), (1, "kv"), (2, "weights")]


def cost(entry: str, *others: str) -> Cost:
    text = HEADER + "\n\n".join([*others, "ENTRY %main (a: s32[8]) -> f32[] {\n" + entry + "\n}\n"])
    return read_cost(parse(text), GROUPS)


def test_a_matrix_in_hbm_is_read_with_its_padding_and_on_the_chip_for_nothing() -> None:
    counted = cost(
        """  %x = bf16[8,576]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %w = bf16[192,576]{1,0:T(8,128)(2,1)} parameter(2)
  ROOT %dot = bf16[8,192]{1,0:T(8,128)(2,1)S(1)} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}"""
    )
    assert counted.flops == 2 * 8 * 192 * 576
    assert counted.read == {"weights": 192 * 640 * 2}
    assert counted.written == {}


def test_a_copy_counts_both_ways_and_a_second_read_counts_again() -> None:
    counted = cost(
        """  %w = f32[128,128]{1,0:T(8,128)} parameter(2)
  %copy = f32[128,128]{0,1:T(8,128)} copy(%w)
  %copy-start = (f32[128,128]{1,0:T(8,128)S(1)}, f32[128,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w)
  ROOT %copy-done = f32[128,128]{1,0:T(8,128)S(1)} copy-done(%copy-start)"""
    )
    assert counted.read == {"weights": 2 * 65536}
    assert counted.written == {"other": 65536}


def test_a_loop_counts_its_trips() -> None:
    body = """%body (p: f32[128,128]) -> f32[128,128] {
  %p = f32[128,128]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %dot.1 = f32[128,128]{1,0:T(8,128)S(1)} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""
    counted = cost(
        """  %x = f32[128,128]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %while = f32[128,128]{1,0:T(8,128)S(1)} while(%x), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"7"}}""",
        body,
    )
    assert counted.flops == 7 * 2 * 128**3


def test_an_update_in_place_writes_the_new_rows_only() -> None:
    write = """%write (c: bf16[4096,128], i: s32[8], n: bf16[8,128]) -> bf16[4096,128] {
  %c = bf16[4096,128]{1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[8]{0:T(128)S(1)} parameter(1)
  %n = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  ROOT %scatter = bf16[4096,128]{1,0:T(8,128)(2,1)} scatter(%c, %i, %n), to_apply=%assign
}"""
    counted = cost(
        """  %slots = s32[8]{0:T(128)S(1)} parameter(0)
  %cache = bf16[4096,128]{1,0:T(8,128)(2,1)} parameter(1)
  %new = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} iota()
  ROOT %fusion = bf16[4096,128]{1,0:T(8,128)(2,1)} fusion(%cache, %slots, %new), kind=kCustom, calls=%write, backend_config={"aliasing_operands":{"lists":[{"indices":["0","3"]}]}}""",
        write,
    )
    assert counted.read == {"kv": 0}
    assert counted.written == {"kv": 8 * 128 * 2}


def test_a_lookup_reads_its_rows_only_also_behind_views() -> None:
    view = """%view (t: bf16[49152,640]) -> bf16[49152,640] {
  %t = bf16[49152,640]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %bitcast = bf16[49152,640]{1,0:T(8,128)(2,1)} bitcast(%t)
}"""
    lookup = """%lookup (t: bf16[49152,640], i: s32[8]) -> bf16[8,640] {
  %t.1 = bf16[49152,640]{1,0:T(8,128)(2,1)} parameter(0)
  %i.1 = s32[8]{0:T(128)S(1)} parameter(1)
  %same = bf16[49152,640]{1,0:T(8,128)(2,1)} fusion(%t.1), kind=kLoop, calls=%view
  ROOT %gather = bf16[8,640]{1,0:T(8,128)(2,1)S(1)} gather(%same, %i.1), slice_sizes={1,640}
}"""
    counted = cost(
        """  %ids = s32[8]{0:T(128)S(1)} parameter(0)
  %table = bf16[49152,640]{1,0:T(8,128)(2,1)} parameter(2)
  ROOT %rows = bf16[8,640]{1,0:T(8,128)(2,1)S(1)} fusion(%table, %ids), kind=kLoop, calls=%lookup""",
        view,
        lookup,
    )
    assert counted.read == {"weights": 8 * 640 * 2}


def test_a_kernel_counts_what_it_says_of_the_cache_and_its_other_operands_whole() -> None:
    counted = cost(
        """  %ids = s32[8]{0:T(1024)} parameter(0)
  %cache = bf16[4096,128]{1,0:T(8,128)(2,1)} parameter(1)
  %blocks = bf16[256,16,128]{2,1,0:T(8,128)(2,1)} bitcast(%cache)
  ROOT %kernel = bf16[8,8,128]{2,1,0:T(8,128)(2,1)} custom-call(%ids, %blocks), custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"1000","transcendentals":"5","bytes_accessed":"777"}}"""
    )
    assert counted.flops == 1000
    assert counted.read == {"other": 4096, "kv": 777}
    assert counted.written == {"other": 8 * 8 * 128 * 2}
