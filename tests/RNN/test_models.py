"""Networks of apex.RNN against torch.nn with the same weights, and multiplicative LSTMs against their formula."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn

from apex import RNN
from apex.RNN.cells import LSTMCell, mLSTMCell, mLSTMRNNCell
from apex.RNN.models import toRNNBackend
from apex.RNN.RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

TIME, BATCH, INPUT, HIDDEN = 5, 3, 4, 6
NAMES = {"w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh", "w_ho": "weight_hr"}
PEERS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "ReLU": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "Tanh": lambda *a, **k: nn.RNN(*a, nonlinearity="tanh", **k),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
# Through the fused function of PyTorch, and step by step.
ROUTES = pytest.mark.parametrize("collect", [False, True], ids=["fused", "steps"])


def copy_weights(stack: stackedRNN, peer: nn.RNNBase) -> None:
    with torch.no_grad():
        for index, cell in enumerate(stack.rnns):
            for name, param in cell.named_parameters():
                getattr(peer, f"{NAMES[name]}_l{index}").copy_(param)


def last(states: list, collect: bool, position: int = -1) -> list[Tensor]:
    """Return the final states, from a list of all of them if they were collected."""
    return [entry[position] for entry in states] if collect else states


def as_list(states: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [states] if isinstance(states, Tensor) else list(states)


def compare(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@DTYPES
@ROUTES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", PEERS)
def test_equal_to_torch(name: str, bias: bool, collect: bool, dtype: torch.dtype) -> None:
    network = getattr(RNN, name)(INPUT, HIDDEN, 2, bias=bias).to(dtype)
    peer = PEERS[name](INPUT, HIDDEN, 2, bias=bias).to(dtype)
    copy_weights(network, peer)
    x = torch.randn(TIME, BATCH, INPUT, dtype=dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs, states = network(ours, collect_hidden=collect)
    expected, expected_states = peer(theirs)
    compare(outputs, expected)
    for state, wanted in zip(last(states, collect), as_list(expected_states), strict=True):
        compare(state, wanted)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    compare(ours.grad, theirs.grad)
    for index, cell in enumerate(network.rnns):
        for key, param in cell.named_parameters():
            compare(param.grad, getattr(peer, f"{NAMES[key]}_l{index}").grad)


@ROUTES
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projection_is_that_of_torch(collect: bool) -> None:
    network = RNN.LSTM(INPUT, HIDDEN, 2, output_size=3).double()
    peer = nn.LSTM(INPUT, HIDDEN, 2, proj_size=3).double()
    copy_weights(network, peer)
    x = torch.randn(TIME, BATCH, INPUT, dtype=torch.float64)
    outputs, states = network(x, collect_hidden=collect)
    expected, expected_states = peer(x)
    compare(outputs, expected)
    for state, wanted in zip(last(states, collect), expected_states, strict=True):
        compare(state, wanted)


@ROUTES
@pytest.mark.parametrize("name", PEERS)
def test_bidirectional_is_two_stacks(name: str, collect: bool) -> None:
    network = getattr(RNN, name)(INPUT, HIDDEN, 2, bidirectional=True).double()
    assert isinstance(network, bidirectionalRNN)
    forward, backward = (PEERS[name](INPUT, HIDDEN, 2).double() for _ in range(2))
    copy_weights(network.fwd, forward)
    copy_weights(network.bckwrd, backward)
    x = torch.randn(TIME, BATCH, INPUT, dtype=torch.float64)
    outputs, states = network(x, collect_hidden=collect)
    (left, left_states), (right, right_states) = forward(x), backward(x.flip(0))
    compare(outputs, torch.cat((left, right.flip(0)), -1))
    left_found = [state[..., :HIDDEN] for state in last(states, collect)]
    right_found = [state[..., HIDDEN:] for state in last(states, collect, position=0)]
    for found, wanted in zip(left_found + right_found, as_list(left_states) + as_list(right_states), strict=True):
        compare(found, wanted)


def test_one_bidirectional_layer_equals_torchs() -> None:
    network = RNN.LSTM(INPUT, HIDDEN, 1, bidirectional=True).double()
    peer = nn.LSTM(INPUT, HIDDEN, 1, bidirectional=True).double()
    with torch.no_grad():
        for stack, suffix in ((network.fwd, ""), (network.bckwrd, "_reverse")):
            for name, param in stack.rnns[0].named_parameters():
                getattr(peer, f"{NAMES[name]}_l0{suffix}").copy_(param)
    x = torch.randn(TIME, BATCH, INPUT, dtype=torch.float64)
    outputs, states = network(x)
    expected, wanted = peer(x)
    compare(outputs, expected)
    for state, both in zip(states, wanted, strict=True):
        compare(state[0], torch.cat((both[0], both[1]), -1))


def multiplicative_lstm(cells: list[mLSTMRNNCell], x: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """Compute Krause et al. (2016), equations 17 to 22, on the rows of each gate."""
    states = [[x.new_zeros(x.size(1), c.output_size), x.new_zeros(x.size(1), c.hidden_size)] for c in cells]
    outputs = []
    for value in x:
        for cell, state in zip(cells, states, strict=True):
            h, c = state
            size = cell.hidden_size
            m = (value @ cell.w_mih.T) * (h @ cell.w_mhh.T)

            total = value @ cell.w_ih.T + m @ cell.w_hh.T
            if cell.b_ih is not None:
                total = total + cell.b_ih + cell.b_hh
            i, f, g, o = (total[:, k * size : (k + 1) * size] for k in range(4))
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            state[:] = [h @ cell.w_ho.T if cell.output_size != size else h, c]
            value = state[0]
        outputs.append(value)
    return torch.stack(outputs), states


@DTYPES
@pytest.mark.parametrize(("bias", "output_size"), [(True, None), (False, None), (True, 3)])
def test_multiplicative_lstm(bias: bool, output_size: int | None, dtype: torch.dtype) -> None:
    network = RNN.mLSTM(INPUT, HIDDEN, 2, bias=bias, output_size=output_size).to(dtype)
    x = torch.randn(TIME, BATCH, INPUT, dtype=dtype)
    outputs, states = network(x)
    exact = copy.deepcopy(network).double()
    expected, wanted = multiplicative_lstm(list(exact.rnns), x.double())
    compare(outputs.double(), expected)
    for kind, state in enumerate(states):
        compare(state.double(), torch.stack([layer[kind] for layer in wanted]))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("name", "output_size"), [*itertools.product([*PEERS, "mLSTM"], [None]), ("LSTM", 1), ("Tanh", 1), ("mLSTM", 1)]
)
def test_gradcheck(name: str, output_size: int | None) -> None:
    network = getattr(RNN, name)(3, 2, 2, output_size=output_size).double()
    x = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        network.reset_hidden(2)
        outputs, states = network(x)
        return outputs, *states

    assert torch.autograd.gradcheck(function, (x, *network.parameters()))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", [*PEERS, "mLSTM"])
@pytest.mark.parametrize("collect", [False, True])
def test_batch_first(name: str, bidirectional: bool, collect: bool) -> None:
    network = getattr(RNN, name)(INPUT, HIDDEN, 2, batch_first=True, bidirectional=bidirectional)
    other = getattr(RNN, name)(INPUT, HIDDEN, 2, bidirectional=bidirectional)
    other.load_state_dict(network.state_dict())
    x = torch.randn(BATCH, TIME, INPUT)
    outputs, states = network(x, collect_hidden=collect)
    expected, wanted = other(x.transpose(0, 1), collect_hidden=collect)
    assert outputs.shape == (BATCH, TIME, HIDDEN * (1 + bidirectional))
    compare(outputs, expected.transpose(0, 1))
    for state, target in zip(last(states, collect), last(wanted, collect), strict=True):
        compare(state, target)


@ROUTES
@pytest.mark.parametrize("name", ["GRU", "mLSTM"])
def test_dropout_between_layers_in_training_only(name: str, collect: bool) -> None:
    network = getattr(RNN, name)(INPUT, HIDDEN, 2, dropout=1.0)
    plain = getattr(RNN, name)(INPUT, HIDDEN, 2)
    plain.load_state_dict(network.state_dict())
    x = torch.randn(TIME, BATCH, INPUT)
    network.eval()
    compare(network(x, collect_hidden=collect)[0], plain(x)[0])
    # With everything dropped, the second layer sees zeros only; the first one's state is as ever.
    network.train()
    network.reset_hidden(BATCH)
    plain.reset_hidden(BATCH)
    outputs, states = network(x, collect_hidden=collect)
    compare(last(states, collect)[0][0], plain(x)[1][0][0])
    alone = stackedRNN(copy.deepcopy(plain.rnns[1]))
    alone.reset_hidden(BATCH)
    compare(outputs, alone(torch.zeros(TIME, BATCH, HIDDEN))[0])


def test_dropout_of_a_half_keeps_the_mean() -> None:
    network = RNN.ReLU(INPUT, HIDDEN, 2, dropout=0.5)
    x = torch.randn(TIME, BATCH, INPUT)
    different = []
    for collect in (False, True):
        runs = []
        for _ in range(2):
            network.reset_hidden(BATCH)
            runs.append(network(x, collect_hidden=collect)[0])
        different.append(not torch.equal(*runs))
    assert different == [True, True]


@ROUTES
def test_hidden_state_lives_on(collect: bool) -> None:
    network = RNN.LSTM(INPUT, HIDDEN, 2).double()
    x = torch.randn(2 * TIME, BATCH, INPUT, dtype=torch.float64)
    whole = network(x)[0]
    network.reset_hidden(BATCH)
    halves = [network(part, collect_hidden=collect)[0] for part in x.split(TIME)]
    compare(torch.cat(halves), whole)
    # The graph goes on through the kept state, until it is detached.
    network.reset_hidden(BATCH)
    first = x[:TIME].clone().requires_grad_()
    network(first, collect_hidden=collect)
    network(x[TIME:], collect_hidden=collect)[0].sum().backward()
    assert first.grad is not None
    first.grad = None
    network.reset_hidden(BATCH)
    network(first, collect_hidden=collect)
    network.detach_hidden()
    network(x[TIME:], collect_hidden=collect)[0].sum().backward()
    assert first.grad is None


@pytest.mark.parametrize("bidirectional", [False, True])
def test_hidden_state_methods(bidirectional: bool) -> None:
    network = RNN.LSTM(INPUT, HIDDEN, 2, bidirectional=bidirectional)
    cells = [module for module in network.modules() if isinstance(module, RNNCell)]
    assert len(cells) == 2 * (1 + bidirectional)
    with pytest.raises(RuntimeError, match="no hidden state"):
        network.detach_hidden()
    network.init_hidden(BATCH)
    assert all(state.shape == (BATCH, HIDDEN) and not state.any() for cell in cells for state in cell.hidden)
    x = torch.randn(TIME, BATCH, INPUT)
    network(x)
    network.init_hidden(BATCH)  # the existing states stay
    assert all(state.any() for cell in cells for state in cell.hidden)
    network.detach_hidden()
    assert not any(state.requires_grad for cell in cells for state in cell.hidden)
    network(torch.randn(TIME, BATCH + 1, INPUT))  # another batch size starts anew
    assert cells[0].hidden[0].shape == (BATCH + 1, HIDDEN)
    network.init_inference(BATCH)
    assert not any(state.any() for cell in cells for state in cell.hidden)
    before = [param.detach().clone() for param in network.parameters()]
    network.reset_parameters()
    assert all(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert max(param.abs().max().item() for param in network.parameters()) <= HIDDEN**-0.5


def test_a_cell_alone_and_a_list_of_cells() -> None:
    cell = RNNCell(4, INPUT, HIDDEN, LSTMCell, 2, bias=True)
    peer = nn.LSTMCell(INPUT, HIDDEN)
    with torch.no_grad():
        for name, param in cell.named_parameters():
            getattr(peer, NAMES[name]).copy_(param)
    x = torch.randn(BATCH, INPUT)
    wanted = None
    for _ in range(3):
        found, wanted = cell(x), peer(x, wanted)
        for state, target in zip(found, wanted, strict=True):
            compare(state, target)
    wider = RNNCell(4, HIDDEN, 2 * HIDDEN, LSTMCell, 2)
    network = toRNNBackend([cell, wider], 2)
    network.reset_hidden(BATCH)
    with pytest.raises(RuntimeError, match="stack expects"):  # states of different sizes do not make a tensor
        network(x[None])
    network = toRNNBackend([cell, cell.new_like(HIDDEN)], 2, bidirectional=True)
    assert network(x[None])[0].shape == (1, BATCH, 2 * HIDDEN)


def test_the_multiplicative_cell_is_a_function() -> None:
    x, h, c = torch.randn(BATCH, 4), torch.ones(BATCH, 2), torch.zeros(BATCH, 1)
    h, c = mLSTMCell(x, [h, c], torch.ones(4, 4), torch.ones(4, 2), torch.ones(2, 4), torch.ones(2, 2))
    assert h.shape == c.shape == (BATCH, 1)


def test_hooks_of_a_layer_are_called() -> None:
    network = RNN.Tanh(INPUT, HIDDEN, 2)
    seen = []
    network.rnns[0].register_forward_hook(lambda *_: seen.append(1))
    network(torch.randn(TIME, BATCH, INPUT))
    assert len(seen) == TIME


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*PEERS, "mLSTM"])
def test_half_precision_and_autocast(name: str, dtype: torch.dtype) -> None:
    exact = getattr(RNN, name)(INPUT, HIDDEN, 2, bidirectional=True)
    half = copy.deepcopy(exact).to(dtype)
    x = torch.randn(TIME, BATCH, INPUT)
    expected = exact(x)[0]
    limit = 5 * torch.finfo(dtype).eps
    for collect in (False, True):
        half.reset_hidden(BATCH)
        outputs = half(x.to(dtype), collect_hidden=collect)[0]
        assert outputs.dtype == dtype
        assert (outputs.float() - expected).abs().max() < limit
        outputs.float().sum().backward()
        exact.reset_hidden(BATCH)
        with torch.autocast("cpu", dtype):
            outputs = exact(x, collect_hidden=collect)[0]
            assert (outputs.float() - expected).abs().max() < limit
            outputs.float().sum().backward()
            exact.detach_hidden()
            exact(x, collect_hidden=collect)
        exact.detach_hidden()
        assert exact(x, collect_hidden=collect)[0].dtype == torch.float32  # though autocast left half-precision states
    assert all(param.grad is not None for param in (*half.parameters(), *exact.parameters()))


def test_copies_and_casts_after_use() -> None:
    network = RNN.GRU(INPUT, HIDDEN, 1)
    x = torch.randn(TIME, BATCH, INPUT)
    network(x)
    twin = copy.deepcopy(network)
    compare(twin(x)[0], network(x)[0])
    network.detach_hidden()
    assert network.double()(x.double())[0].dtype == torch.float64
    names = ["rnns.0.w_ih", "rnns.0.w_hh", "rnns.0.b_ih", "rnns.0.b_hh"]
    assert list(network.state_dict()) == names


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="output_size is 3"):
        RNN.GRU(INPUT, HIDDEN, 1, output_size=3)
    with pytest.raises(ValueError, match="num_layers is 0"):
        RNN.LSTM(INPUT, HIDDEN, 0)
    with pytest.raises(ValueError, match="dropout is 2"):
        RNN.LSTM(INPUT, HIDDEN, 2, dropout=2)
    with pytest.raises(ValueError, match="hidden_size is 0"):
        RNN.LSTM(INPUT, 0, 2)
    with pytest.raises(ValueError, match="has 1 layers"):
        stackedRNN([RNNCell(4, 1, 1, LSTMCell)], num_layers=2)
    with pytest.raises(TypeError, match="Linear"):
        stackedRNN(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"\[time, batch, input\]"):
        RNN.LSTM(INPUT, HIDDEN, 1)(torch.zeros(TIME, INPUT))
    with pytest.raises(ValueError, match=r"\[batch, time, input\]"):
        RNN.LSTM(INPUT, HIDDEN, 1, batch_first=True)(torch.zeros(BATCH, 0, INPUT))


@pytest.mark.parametrize("name", [*PEERS, "mLSTM"])
def test_inputs_of_another_size_are_refused(name: str) -> None:
    """PyTorch's LSTM for CPUs does not check the size and reads memory behind the weights."""
    network = getattr(RNN, name)(INPUT, HIDDEN, 2)
    for size in (INPUT - 1, INPUT + 1):
        with pytest.raises(ValueError, match=f"input_size, {INPUT}"):
            network(torch.zeros(TIME, BATCH, size))
    assert network.rnns[0].hidden[0] is None


@pytest.mark.parametrize("bidirectional", [False, True])
def test_hidden_states_as_an_argument_are_refused(bidirectional: bool) -> None:
    """torch.nn.LSTM takes them second; here the second argument is a flag, and the states were ignored."""
    network = RNN.LSTM(INPUT, HIDDEN, 1, bidirectional=bidirectional)
    state = torch.zeros(1, BATCH, HIDDEN)
    for states in (state, (state, state)):
        with pytest.raises(TypeError, match="collect_hidden"):
            network(torch.zeros(TIME, BATCH, INPUT), states)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*PEERS, "mLSTM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    exact = getattr(RNN, name)(INPUT, HIDDEN, 2, bidirectional=True).double()
    network = copy.deepcopy(exact).to("cuda", dtype)
    x = torch.randn(TIME, BATCH, INPUT)
    expected = exact(x.double())[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # cuDNN warns of weights that do not lie together
        outputs = network(x.to("cuda", dtype))[0]
    assert (outputs.double().cpu() - expected).abs().max() < (2e-3 if dtype == torch.float32 else 5e-3)
    outputs.float().sum().backward()
    network = network.float()
    network.reset_hidden(BATCH)
    with torch.autocast("cuda", torch.float16):
        outputs = network(x.to("cuda"))[0]
    assert (outputs.double().cpu() - expected).abs().max() < 5e-3
    network.detach_hidden()
    network.eval()
    network(x.to("cuda"))[0].sum().backward()
