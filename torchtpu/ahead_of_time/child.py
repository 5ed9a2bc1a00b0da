"""The compiler's process: `python -m torchtpu.ahead_of_time.child JOB`.

libtpu is loaded here and nowhere else, because a process has one TPU library, and the engine's may be our
PJRT shim. JOB is a JSON file: {"topology": …, "programs": [{"stablehlo": path, "donated": [indices],
"result": path, "hlo": path}]}. `result` becomes JSON: {"memory": {…}} or {"refusal": text}; `hlo` the
scheduled program as the compiler prints it. The environment is that of
`torchtpu.environment.tpu_compiler_variables`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jaxlib.xla_client as xla
import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jax.experimental import topologies
from jaxlib.mlir import ir

_ONE_CHIP = (1, 1, 1)
_MEMORY = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "shared": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
    "peak": "peak_memory_in_bytes",
}


def run(job: dict[str, Any]) -> None:
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=job["topology"], chips_per_host_bounds=_ONE_CHIP
    )
    device = topology.devices[0]
    printed = Path(job["printed"])
    for program in job["programs"]:
        for file in printed.glob("*"):
            file.unlink()
        result = _compile(device, Path(program["stablehlo"]).read_text(), program["donated"])
        for file in printed.glob("*TLP-hlo.txt"):
            file.rename(program["hlo"])
        Path(program["result"]).write_text(json.dumps(result))


def _compile(device: Any, stablehlo: str, donated: list[int]) -> dict[str, Any]:  # noqa: ANN401
    options = xla.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    build = options.executable_build_options
    build.num_replicas = build.num_partitions = 1
    build.device_assignment = xla.DeviceAssignment.create(np.array([[device.id]], np.int32))
    with jax_mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        _donate(module, donated)
        try:
            executable = device.client.compile(
                module, executable_devices=xla.DeviceList((device,)), compile_options=options
            )
        except jax.errors.JaxRuntimeError as error:
            return {"refusal": str(error)}
    stats = executable.get_compiled_memory_stats()
    return {"memory": {name: getattr(stats, field) for name, field in _MEMORY.items()}}


def _donate(module: ir.Module, donated: list[int]) -> None:
    """Say that the last outputs take the memory of these inputs."""
    main: Any = next(
        op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"'
    )
    first = len(main.type.results) - len(donated)
    places = {index: first + number for number, index in enumerate(donated)}
    integer = ir.IntegerType.get_signless(32)
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(
        [
            ir.DictAttr.get(
                {"tf.aliasing_output": ir.IntegerAttr.get(integer, places[index])}
                if index in places
                else {}
            )
            for index in range(len(main.type.inputs))
        ]
    )


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
