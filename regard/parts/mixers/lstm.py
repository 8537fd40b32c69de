"""Long short-term memory: a recurrence whose cell is added to instead of overwritten, so that it can remember for long.

    i, f, o  = sigmoid(W [x_t; h_(t-1)] + b)            what to let in, to keep and to show
    g        = tanh(W' [x_t; h_(t-1)] + b')
    c_t      = f * c_(t-1) + i * g,      h_t = o * tanh(c_t)

Hochreiter & Schmidhuber 1997, "Long Short-Term Memory"; the forget gate: Gers et al. 2000; two directions: Schuster &
Paliwal 1997.
"""

from regard.bases.recurrent import Recurrent


class Lstm(Recurrent):
    """An LSTM, by torch's kernel.

    hidden:  channels of a state, and of the output in each direction; None: the width.
    layers:  one above the other.
    both:    also read backwards; the whole sequence is then needed at once, and the output is twice as wide.
    begin:   "zeros", or "memory": the last states of the encoder's recurrent mixers, where it has any.
    dropout: between the layers.
    """

    kind = "lstm"
    examples = ({}, {"hidden": 5, "layers": 2, "begin": "memory"}, {"hidden": 7, "layers": 2, "both": True})
