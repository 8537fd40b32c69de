"""Gated recurrent unit (GRU): a recurrence with fewer gates than an LSTM, and no cell.

    r, z = sigmoid(W [x_t; h_(t-1)] + b)                reset gate, and update gate
    n    = tanh(W_x x_t + b_x + r * (W_h h_(t-1) + b_h))
    h_t  = (1 - z) * n + z * h_(t-1)

Cho et al. 2014, arXiv:1406.1078; with the reset gate after the product, as in cuDNN and torch.
"""

from regard.bases.recurrent import Recurrent


class Gru(Recurrent):
    """A GRU, computed by torch.

    hidden:  channels of a state, and of the output in each direction; None: the width.
    layers:  number of stacked layers.
    both:    bidirectional; the whole sequence is then needed at once, and the output is twice as wide.
    begin:   initial state: "zeros", or "memory": the final states of the encoder's recurrent mixers, if it has any.
    dropout: dropout between the layers.
    """

    kind = "gru"
    examples = ({}, {"hidden": 5, "layers": 2, "begin": "memory"}, {"hidden": 7, "layers": 2, "both": True})
