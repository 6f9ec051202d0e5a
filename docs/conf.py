"""Configuration of the documentation site. `make docs` builds it without network access."""

import importlib.metadata
import os
import pathlib
import sys

# Autodoc imports kdist, which imports TensorFlow. Both messages would end up in the build's log.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "_extensions")]

project = "kdist"
author = "The kdist authors"
copyright = f"2026, {author}"
release = importlib.metadata.version("kdist")
version = release

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "repository_pages",
    "reference_pages",
    "plain_docstrings",
]
exclude_patterns = ["_extensions"]

# Pages.
# Where files of the repository that are no page of the site can be read. The badges of
# notebooks/*.ipynb name the same repository. YOUR_NAME is no name that GitHub allows: whoever
# publishes the repository replaces it here and in the notebooks.
repository = os.environ.get("GITHUB_REPOSITORY", "YOUR_NAME/kdist")
repository_pages = {
    "project/architecture": "ARCHITECTURE.md",
    "project/changelog": "CHANGELOG.md",
    "project/contributing": "CONTRIBUTING.md",
    "project/security": "SECURITY.md",
    "tutorials/{stem}": "notebooks/*.ipynb",
    "evidence/results/{stem}": "benchmarks/results/*.md",
}
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # Notebooks are shown as they are stored. Tests run them.
nb_merge_streams = True
nb_output_stderr = "remove"  # TensorFlow's messages about the machine.
suppress_warnings = ["mystnb.unknown_mime_type"]

# Reference.
reference_packages = [
    "kdist",
    *(f"kdist.{name}" for name in ("callbacks", "checkpoint", "data", "devices", "launch")),
    *(f"kdist.{name}" for name in ("mirror", "models", "parallel", "planner", "report")),
    *(f"kdist.{name}" for name in ("run_directory", "schedules", "serving", "strategies")),
    *(f"kdist.{name}" for name in ("telemetry", "testing", "testing.clouds", "testing.metadata")),
    *(f"kdist.{name}" for name in ("tuning", "tuning.keras_tuner", "tuning.optuna")),
    "kdist.tuning.ray_tune",
]
default_role = "code"
autodoc_typehints = "none"  # Args: describes types where the signature, which shows them, does not.
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
add_module_names = False

# Appearance.
html_theme = "sphinx_book_theme"
html_title = "kdist"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "repository_url": f"https://github.com/{repository}",
    "repository_branch": "main",
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
    "show_navbar_depth": 1,
    "show_toc_level": 2,
}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
