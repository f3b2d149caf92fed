"""The loss scale: upstream's sequence step for step, bounds, static scales, and what clients read and write."""

import math
import re
import warnings
from typing import Any

import pytest
import torch

from apex import amp
from apex.amp._amp_state import _amp_state as state
from apex.amp.scaler import LossScaler
from apex.optimizers import FusedSGD
from tests.amp.common import assert_same, loss_of, overflow_at, quiet, small_model, train, values
from tests.support.drawn import given, settings, st


class Model:
    """Upstream's rule in plain Python, from its documentation: doubles, no device."""

    def __init__(self, scale: float, window: int, floor: float | None, ceiling: float, growth: float, backoff: float):
        self.scale, self.good = min(ceiling, scale), 0
        self.window, self.floor, self.ceiling, self.growth, self.backoff = window, floor, ceiling, growth, backoff

    def update(self, overflow: bool) -> bool:
        if overflow:
            lowered = self.scale * self.backoff
            self.scale = max(self.floor, lowered) if self.floor else lowered
            self.good = 0
        else:
            self.good += 1
        if self.good == self.window:
            self.scale = min(self.ceiling, self.scale * self.growth)
            self.good = 0
        return overflow


powers = st.integers(-6, 30).map(lambda exponent: 2.0**exponent)


@settings(max_examples=200, deadline=None)
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=40),
    start=powers,
    window=st.integers(1, 6),
    bounds=st.tuples(st.none() | st.just(0.0) | powers, powers).filter(lambda pair: (pair[0] or 0.0) <= pair[1]),
    growth=st.sampled_from([1.0, 2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25, 1.0]),
)
def test_sequence(overflows: list, start: float, window: int, bounds: tuple, growth: float, backoff: float) -> None:
    floor, ceiling = bounds
    ours = LossScaler("dynamic", start, growth, window, floor, ceiling, backoff_factor=backoff)
    theirs = Model(start, window, floor, ceiling, growth, backoff)
    for overflow in overflows:
        ours.clear_overflow_state()
        ours._overflow_buf.fill_(float(overflow))
        assert ours.update_scale() is theirs.update(overflow)
        assert (ours.loss_scale(), ours._unskipped) == (theirs.scale, theirs.good)


@settings(max_examples=50, deadline=None)
@given(overflows=st.lists(st.booleans(), min_size=1, max_size=30), growth=st.floats(1, 3), backoff=st.floats(0.3, 1))
def test_sequence_with_factors_that_are_no_powers_of_two(overflows: list, growth: float, backoff: float) -> None:
    """Compare up to one float32 rounding per change."""
    ours = LossScaler("dynamic", 2.0**10, growth, 3, backoff_factor=backoff)
    theirs = Model(2.0**10, 3, None, 2.0**24, growth, backoff)
    for overflow in overflows:
        ours._has_overflow = overflow
        ours.update_scale()
        theirs.update(overflow)
        assert ours.loss_scale() == pytest.approx(theirs.scale, rel=1e-5)
        assert ours._unskipped == theirs.good


def test_static_scale_never_changes() -> None:
    scaler = LossScaler(128.0)
    for overflow in (True, False, True):
        scaler._has_overflow = overflow
        assert scaler.update_scale() is False
    assert scaler.loss_scale() == 128.0
    assert scaler._unskipped == 3  # upstream counts here too


def test_options_of_initialize_reach_every_scaler() -> None:
    quiet(
        small_model(),
        opt_level="O2",
        num_losses=3,
        dynamic_init_scale=2.0**10,
        scale_growth_factor=4.0,
        scale_backoff_factor=0.25,
        scale_window=2,
        min_loss_scale=2.0**7,
        max_loss_scale=2.0**11,
    )
    assert len(state.loss_scalers) == 3
    for scaler in state.loss_scalers:
        sequence = []
        for overflow in (True, True, False, False, False, False):
            scaler._has_overflow = overflow
            scaler.update_scale()
            sequence.append(scaler.loss_scale())
        assert sequence == [2.0**8, 2.0**7, 2.0**7, 2.0**9, 2.0**9, 2.0**11]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
def test_sequence_in_training(level: str, kind: Any) -> None:
    model = small_model()
    model, optimizer = quiet(model, kind(model.parameters(), lr=0.01), opt_level=level, scale_window=3)
    theirs = Model(2.0**16, 3, None, 2.0**24, 2.0, 0.5)
    bad = {1, 2, 6}
    for step in range(12):
        train(model, optimizer, [step], overflow_at(*bad))
        theirs.update(step in bad)
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": theirs.scale, "unskipped": theirs.good}}


def test_attributes_that_clients_read_and_write() -> None:
    model = small_model()
    quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O2")
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler._loss_scale == 2.0**16
    assert scaler._scale_seq_len == 2000
    assert scaler._max_loss_scale == 2.0**24
    assert scaler.dynamic
    scaler._loss_scale = 64.0
    assert scaler.loss_scale() == 64.0
    scaler._scale_seq_len = 1
    assert scaler.update_scale() is False
    assert scaler._loss_scale == 128.0
    # NVIDIA's BERT reduces gradients itself and replaces amp's flag by an integer.
    flag, scaler._overflow_buf = scaler._overflow_buf, torch.tensor([1], dtype=torch.int32)
    assert scaler.update_scale()
    assert scaler._loss_scale == 64.0
    scaler._overflow_buf = flag
    scaler.clear_overflow_state()
    assert not scaler._has_overflow


def test_a_scale_set_outside_of_the_bounds() -> None:
    scaler = LossScaler("dynamic", scale_window=2, min_loss_scale=2.0, max_loss_scale=8.0)
    scaler._loss_scale = 64.0
    scaler.update_scale()
    assert scaler.loss_scale() == 64.0
    scaler.update_scale()
    assert scaler.loss_scale() == 8.0


def test_an_update_scale_of_the_clients_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projects that shard models replace it to ask all processes; amp uses its result."""
    calls = []

    def update_scale(self: LossScaler) -> bool:
        self._has_overflow = True  # another process had one
        self._loss_scale = max(1.0, self._loss_scale / 2.0)
        self._unskipped = 0
        calls.append(self)
        return True

    monkeypatch.setattr(LossScaler, "update_scale", update_scale)
    model = small_model()
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O2")
    before = model[0].weight.detach().clone()
    train(model, optimizer, 1)
    assert torch.equal(model[0].weight, before)
    assert len(calls) == 1
    assert state.loss_scalers[0].loss_scale() == 2.0**15


def test_unscale_by_hand() -> None:
    scaler = LossScaler("dynamic", init_scale=4.0)
    grads, masters = [torch.tensor([4.0, 8.0]).half()], [torch.empty(2)]
    scaler.unscale(grads, masters)
    assert masters[0].tolist() == [1.0, 2.0]
    scaler.unscale_with_stashed(grads, masters, masters)
    assert masters[0].tolist() == [2.0, 4.0]
    scaler.unscale_with_stashed(grads, masters, masters, scale_override=(2.0, 1.0, 1.0))
    assert masters[0].tolist() == [4.0, 8.0]
    scaler.unscale_python(grads, masters, 8.0)
    assert masters[0].tolist() == [0.5, 1.0]
    scaler.unscale_with_stashed_python(grads, masters, masters, 0.5, 2.0)
    assert masters[0].tolist() == [3.0, 6.0]
    assert not scaler._has_overflow
    scaler.unscale([torch.tensor([float("nan")])], [torch.empty(1)])
    assert scaler._has_overflow


def test_state_dict_has_upstreams_layout() -> None:
    quiet(small_model(), opt_level="O2", num_losses=2)
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 65536.0, "unskipped": 0},
    }
    into: dict = {"other": 1}
    assert amp.state_dict(into) is into
    assert set(into) == {"other", "loss_scaler0", "loss_scaler1"}
    assert "state_dict" in amp.__dict__


def test_load_state_dict() -> None:
    model = small_model()
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O2", num_losses=2)
    saved = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 5}, "loss_scaler1": {"loss_scale": 2.0, "unskipped": 0}}
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    for wrong, match in (
        ({"loss_scaler0": saved["loss_scaler0"]}, "num_losses=1"),
        ({**saved, "loss_scaler2": saved["loss_scaler0"]}, "num_losses=3"),
        ({**saved, "something": {}}, "unexpected key"),
        ({"loss_scaler0": {"loss_scale": 1.0}, "loss_scaler1": saved["loss_scaler1"]}, "unskipped"),
        ({"loss_scaler0": saved["loss_scaler0"], "loss_scaler7": saved["loss_scaler1"]}, "loss_scaler7"),
    ):
        with pytest.raises(RuntimeError, match=match):
            amp.load_state_dict(wrong)
        assert amp.state_dict() == saved
    train(model, optimizer, 1)


GOOD = {"loss_scale": 8.0, "unskipped": 5}


@pytest.mark.parametrize(
    ("error", "match", "entry"),
    [
        (ValueError, "finite in float32, not nan", {**GOOD, "loss_scale": float("nan")}),
        (ValueError, "finite in float32, not inf", {**GOOD, "loss_scale": float("inf")}),
        (ValueError, "finite in float32, not 1e\\+300", {**GOOD, "loss_scale": 1e300}),
        (ValueError, "finite in float32, not 0.0", {**GOOD, "loss_scale": 0}),
        (ValueError, "finite in float32, not -2.0", {**GOOD, "loss_scale": -2.0}),
        (TypeError, "a positive number .*, not '8'", {**GOOD, "loss_scale": "8"}),
        (TypeError, "a positive number .*, not True", {**GOOD, "loss_scale": True}),
        (TypeError, "a positive number .*, not None", {**GOOD, "loss_scale": None}),
        (TypeError, "an integer of at least 0, not 2.5", {**GOOD, "unskipped": 2.5}),
        (ValueError, "an integer of at least 0, not -1", {**GOOD, "unskipped": -1}),
        (RuntimeError, "'loss_scale' and 'unskipped'", {"loss_scale": 8.0}),
        (RuntimeError, "'loss_scale' and 'unskipped'", {**GOOD, "more": 1}),
        (RuntimeError, "'loss_scale' and 'unskipped'", 8.0),
    ],
)
def test_bad_scales_change_nothing(error: type[Exception], match: str, entry: Any) -> None:
    """Not even the valid scale of the first loss is loaded."""
    quiet(small_model(), opt_level="O2", num_losses=2)
    before = amp.state_dict()
    with pytest.raises(error, match=match):
        amp.load_state_dict({"loss_scaler0": GOOD, "loss_scaler1": entry})
    assert amp.state_dict() == before
    with pytest.raises(TypeError, match="not list"):
        amp.load_state_dict([GOOD])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("level", "saved", "expected", "warned"),
    [
        ("O1", (1.0, 0), (65536.0, 0), "dynamic scale stays 65536.0"),  # saved by O0, O3, O4 or O5
        ("O2", (1.0, 12), (65536.0, 12), "dynamic scale stays 65536.0"),
        ("O2", (128.0, 5000), (128.0, 0), None),  # of a static scale: it will grow
        ("O2", (2, torch.tensor([7])), (2.0, 7), None),
        ("O2", (torch.tensor(0.5), 7), (0.5, 7), None),
        ("O3", (65536.0, 12), (1.0, 12), "stays 1.0; .* loss_scale=65536.0"),  # saved by O1 or O2
        ("O5", (1.0, 2**40), (1.0, 2**31 - 1), None),
    ],
)
def test_scales_of_another_level(level: str, saved: Any, expected: Any, warned: str | None) -> None:
    model = small_model()
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level=level)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        amp.load_state_dict({"loss_scaler0": dict(zip(GOOD, saved, strict=True))})
    assert len(said) == (warned is not None)
    assert warned is None or re.search(warned, str(said[0].message))
    assert amp.state_dict()["loss_scaler0"] == dict(zip(GOOD, expected, strict=True))
    train(model, optimizer, 1)


def test_a_dynamic_scale_of_one_is_taken_where_it_is_at_home() -> None:
    quiet(small_model(), opt_level="O2", dynamic_init_scale=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 3}})
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1.0, "unskipped": 3}


def test_before_initialize() -> None:
    with pytest.raises(RuntimeError, match=r"before amp\.initialize"):
        amp.load_state_dict({})
    model = small_model()
    with (
        pytest.raises(RuntimeError, match=r"before amp\.initialize"),
        amp.scale_loss(loss_of(model, 0), FusedSGD(model.parameters(), lr=0.1)),
    ):
        pass


@pytest.mark.parametrize("loss_id", [2, -3, "0"])
def test_unknown_loss(loss_id: Any) -> None:
    model = small_model()
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level="O2", num_losses=2)
    with pytest.raises(IndexError, match="num_losses=2"), amp.scale_loss(loss_of(model, 0), optimizer, loss_id):
        pass
    train(model, optimizer, 1)


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("loss must be a tensor, not float", {"loss": 1.0}),
        ("loss must be a tensor, not list", {"loss": [torch.ones(1)]}),
        ("loss must be a tensor of floating-point numbers, not of torch.int64", {"loss": torch.tensor(1)}),
        ("optimizers must be an optimizer or a list of them, not NoneType", {"optimizers": None}),
        ("optimizers must be .* not Sequential", {"optimizers": [small_model()]}),
        ("delay_unscale must be True or False, not 'no'", {"delay_unscale": "no"}),
        ("delay_overflow_check must be True or False", {"delay_overflow_check": 1.0}),
    ],
)
def test_bad_arguments_of_scale_loss(match: str, arguments: dict, level: str) -> None:
    """They are refused before gradients change."""
    model = small_model()
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.1), opt_level=level)
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    before = values(param.grad for param in amp.master_params(optimizer))
    arguments = {"loss": loss_of(model, 1), "optimizers": optimizer, **arguments}
    with pytest.raises(TypeError, match=match), amp.scale_loss(**arguments):
        raise AssertionError("entered")
    assert_same(before, [param.grad for param in amp.master_params(optimizer)])


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (ValueError, "loss_scale", math.nan),
        (ValueError, "loss_scale", "abc"),
        (ValueError, "loss_scale", -2.0),
        (TypeError, "loss_scale", None),
        (ValueError, "init_scale", 0.0),
        (ValueError, "scale_factor", 0.5),
        (ValueError, "scale_window", 0),
        (TypeError, "scale_window", 0.5),
        (ValueError, "min_loss_scale", math.inf),
        (ValueError, "min_loss_scale", 2.0**25),
        (ValueError, "max_loss_scale", math.nan),
        (ValueError, "backoff_factor", 1.5),
    ],
)
def test_bad_arguments_of_scalers(error: type[Exception], name: str, value: Any) -> None:
    with pytest.raises(error, match=name):
        LossScaler(**{"loss_scale": "dynamic", name: value})


@pytest.mark.parametrize("num_loss", [0, 1.5, "1"])
def test_bad_arguments_of_the_older_interface(num_loss: Any) -> None:
    handle: Any = amp.init()
    model = small_model()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    with pytest.raises((TypeError, ValueError), match="num_loss must be an integer"):
        handle.wrap_optimizer(optimizer, num_loss)
    with pytest.raises(TypeError, match="optimizers must be"):
        handle.wrap_optimizer(model)
    with pytest.raises(TypeError, match="loss must be a tensor"), handle.wrap_optimizer(optimizer).scale_loss(3.0):
        pass
    with pytest.raises(TypeError, match="loss must be a tensor"), handle.scale_loss(3.0, optimizer):
        pass
    handle._deactivate()
    for options in ({"enabled": "no"}, {"loss_scale": math.nan}, {"patch_type": "half"}, {"patch_type": torch.int8}):
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            amp.init(**options)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
