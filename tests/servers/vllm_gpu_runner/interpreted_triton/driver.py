"""A driver without a device, which is always there."""

from typing import Any

from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return True

    def _compiles_nothing(self, *_: Any) -> Any:
        raise NotImplementedError("kernels are interpreted here: set TRITON_INTERPRET=1")

    map_python_to_cpp_type = get_current_target = get_active_torch_device = get_benchmarker = _compiles_nothing
