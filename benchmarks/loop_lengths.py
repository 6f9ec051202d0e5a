"""Lengths of training loops with `kdist.step`, next to the published programs that they rewrite.

  python -m benchmarks.loop_lengths FOLDER

FOLDER holds the originals (docs/evidence/own_loops.md has their addresses), under their names. Both
sides are printed by `ast.unparse` first, so that each statement is one line, whatever its style.
Imports, docstrings, and comments do not count. Models, data, tests, plots, and timers do not count
on the side of the originals. Ours are those of tests/training/test_custom_steps.py, with the
strategy, the decorator, and the session with checkpoints.
"""

import ast
import dataclasses
import json
import pathlib
import re
import sys
import textwrap

OURS = pathlib.Path(__file__).parents[1] / "tests" / "training" / "test_custom_steps.py"
# A session writes checkpoints; only some of the originals do.
PROGRAM = """
strategy = kdist.create_strategy()
with strategy.scope():
    {}
{}
with kdist.session(models, optimizers, metrics, run_dir="run", checkpoint_steps=100) as session:
    for logs in session.run(train_step, data, epochs=10):
        print(logs)
"""
_ALWAYS_LEFT_OUT = r"start|end_time|print\('Time|display|plt\."
_TESTS = r"def (distributed_)?test_step|for x in test|.*test_"
_SAMPLES_AND_TESTS = r".*generate|num_examples|random_vector|.*test|loss = tf|elbo|print"
_REWARDS = (
    r"min_ep|max_|reward_|running|episodes_|t.set_|if |print|initial_state,|for i in t:\s+pass"
)
_PLAIN_NETWORK = (
    r"def (compute_gradients|apply_gradients|train_batch|train_model|eval_)|if i %|losses"
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """An original and the loop that rewrites it.

    Attributes:
        ours: function in the tests.
        file: file of the original.
        cells: code cells of a notebook that count.
        left_out: pattern of statements that do not count.
    """

    ours: str
    file: str
    cells: tuple[int, ...] = ()
    left_out: str = "$^"


PAIRS = {
    "TensorFlow, custom training": Pair(
        "regularized", "custom_training.ipynb", (3, 6, 8, 9, 10, 11, 12, 13), _TESTS
    ),
    "TensorFlow, several workers": Pair(
        "regularized", "multi_worker_with_ctl.ipynb", (*range(11, 20),)
    ),
    "TensorFlow, parameter servers": Pair(
        "regularized",
        "parameter_server_training.ipynb",
        (11, 13, 14, 15, 16),
        "model_input|emb_|dense_output",
    ),
    "Keras, loop from scratch": Pair(
        "regression", "writing_a_custom_training_loop_in_tensorflow.py"
    ),
    "DCGAN": Pair(
        "gan", "dcgan.ipynb", (13, 14, 15, 16, 17, 19, 20, 22), "generate_and_save|noise = "
    ),
    "WGAN-GP": Pair("wgan_gp", "wgan_gp.py"),
    "VAE": Pair("vae", "cvae.ipynb", (8, 9, 12), _SAMPLES_AND_TESTS),
    "Actor-critic": Pair("actor_critic", "actor_critic.ipynb", (9, 10, 11), _REWARDS),
    "MAML": Pair("maml", "maml.ipynb", (5, 9, 11, 12), _PLAIN_NETWORK),
}


class _LeftOut(ast.NodeTransformer):
    """Removes imports, docstrings, and statements whose text matches a pattern."""

    def __init__(self, pattern):
        self._pattern = re.compile(f"{_ALWAYS_LEFT_OUT}|{pattern}")

    def visit(self, node):
        node = self.generic_visit(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return None
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return None
        if isinstance(node, ast.stmt) and self._pattern.match(ast.unparse(node).splitlines()[0]):
            return None
        if isinstance(node, ast.For | ast.If | ast.With | ast.FunctionDef) and not node.body:
            return None
        return node


def count(source: str, left_out: str = "$^") -> int:
    """Returns the number of lines of a program, one for each statement or its head."""
    tree = _LeftOut(left_out).visit(ast.parse(source))
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())


def original(path: pathlib.Path, cells: tuple[int, ...]) -> str:
    """Returns the text of some code cells of a notebook, or of a file."""
    if path.suffix == ".py":
        return path.read_text()
    notebook = json.loads(path.read_text())
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return "\n".join(re.sub(r"^[%!].*$", "", code[number], flags=re.M) for number in cells)


def ours(name: str) -> str:
    """Returns a loop of the tests as a program: set-up in the scope, the step, and the session."""
    functions = {getattr(node, "name", ""): node for node in ast.parse(OURS.read_text()).body}
    *setup, step, _ = functions[name].body  # without the return, which hands the parts to the test
    step.decorator_list = [ast.parse("kdist.step(strategy)", mode="eval").body]
    in_scope = textwrap.indent("\n".join(map(ast.unparse, setup)), "    ").strip()
    return PROGRAM.format(in_scope, ast.unparse(step))


def main():
    folder = pathlib.Path(sys.argv[1])
    print("| program | original | with kdist | ratio |\n|--|--|--|--|")
    for title, pair in PAIRS.items():
        theirs = count(original(folder / pair.file, pair.cells), pair.left_out)
        own = count(ours(pair.ours))
        print(f"| {title} | {theirs} | {own} | {own / theirs:.2f} |")


if __name__ == "__main__":
    main()
