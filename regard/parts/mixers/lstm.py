"""Long short-term memory (LSTM): a recurrence with a gated cell, which can remember over long distances.

    i, f, o  = sigmoid(W [x_t; h_(t-1)] + b)            input, forget and output gates
    g        = tanh(W' [x_t; h_(t-1)] + b')
    c_t      = f * c_(t-1) + i * g,      h_t = o * tanh(c_t)

Hochreiter & Schmidhuber 1997, "Long Short-Term Memory"; the forget gate: Gers et al. 2000; two directions: Schuster &
Paliwal 1997.
"""

from regard.bases.recurrent import Recurrent


class Lstm(Recurrent):
    """An LSTM, computed by torch.

    hidden:  channels of a state, and of the output in each direction; None: the width.
    layers:  number of stacked layers.
    both:    bidirectional; the whole sequence is then needed at once, and the output is twice as wide.
    begin:   initial state: "zeros", or "memory": the final states of the encoder's recurrent mixers, if it has any.
    dropout: dropout between the layers.
    """

    kind = "lstm"
    examples = ({}, {"hidden": 5, "layers": 2, "begin": "memory"}, {"hidden": 7, "layers": 2, "both": True})
