"""The loader that finds and imports the user's hooks, given the path of a folder or file.

The loader looks for the hook `on_x` first in the file `on_x.py`. If the hook is not there, the
loader searches the other .py files of the folder for the name `on_x`. In this search, the files are
parsed and not run. If several of these files define or import the name, the loader raises an error.

Importing a hook file runs the user's code and adds the user's modules to `sys.modules`. Therefore
hooks are imported only in the hook process, never in the proxy's own process.

The proxy reads the hook files once (`HookFiles`), and the hook process imports these texts.
Therefore a hook process that is started again runs the same hooks, even if the files on disk were
edited.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from fakevllm.errors import HookError

REWARD = "on_compute_relative_reward"
SUBMIT = "on_user_submit_new_requests"
FEEDBACK = "on_feedback"

Hook = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Hooks:
    """The user's hook functions, loaded from one folder or file."""

    folder: Path
    reward: Hook
    reward_arity: int
    """Number of arguments with which the reward hook is called: 3, or 2 if it has no parameter
    `question`."""
    submit: Hook | None
    feedback: Hook | None
    content_hash: str
    """Hash of the hook files at the time when they were read. The function `content_hash` returns
    the current hash."""


@dataclass(frozen=True)
class HookFiles:
    """One version of the user's hook files: their names and texts."""

    path: Path
    """The folder of the files, or the only file."""
    texts: Mapping[Path, bytes]
    """The text of each file, in the order of the names."""

    @staticmethod
    def read(path: Path) -> HookFiles:
        """Read the hook files at `path`. Raises HookError if there is no hook file, or if a file
        cannot be read."""
        try:
            path = path.expanduser().resolve()
        except (OSError, RuntimeError) as error:  # such as a loop of symbolic links
            raise HookError(f"{path}: cannot be read ({error}); fix the path") from None
        return HookFiles(path, {file: _read(file) for file in _files(path)})

    @property
    def folder(self) -> Path:
        return next(iter(self.texts)).parent

    @cached_property
    def content_hash(self) -> str:
        """Hash of the hook files, as the function `content_hash` returns it."""
        return hashlib.sha256(b"".join(self.texts.values())).hexdigest()[:16]


def load_hooks(path: Path) -> Hooks:
    """Import the hooks from a folder or from one .py file, and return them. Raises HookError as
    `import_hooks` does."""
    return import_hooks(HookFiles.read(path))


def import_hooks(files: HookFiles) -> Hooks:
    """Import the hooks from `files`, and return the hooks.

    Raises HookError if the hooks cannot be loaded. The error's message is one line that names the
    file, the problem and the fix.
    """
    folder = files.folder
    with importable(files):
        reward = _find(REWARD, files)
        submit = _find(SUBMIT, files)
        feedback = _find(FEEDBACK, files)
    if reward is None:
        raise HookError(
            f"{files.path}: no function `{REWARD}`; define it as README.md in reward_hooks/ shows"
        )
    if submit is not None:
        _arity(submit, SUBMIT, folder, {2: "(request_id, task)"})
    if feedback is not None:
        _arity(feedback, FEEDBACK, folder, {1: "(feedback)"})
    forms = {3: "(valid_results, all_answers, question)", 2: "(valid_results, all_answers)"}
    arity = _arity(reward, REWARD, folder, forms)
    return Hooks(folder, reward, arity, submit, feedback, files.content_hash)


def content_hash(path: Path) -> str:
    """Return a hash of the hook files: the first 16 hex digits of the SHA-256 of all .py files at
    `path`, concatenated in the order of their names. The output of `cat *.py | sha256sum` begins
    with these digits. The files are not imported.

    Raises HookError if `path` has no .py file, or if a file cannot be read.
    """
    return HookFiles.read(path).content_hash


def is_async(hook: Hook) -> bool:
    """Return True if a hook is a coroutine function, or an object with an async `__call__`."""
    return any(map(inspect.iscoroutinefunction, (hook, type(hook).__call__)))


def first_line(error: BaseException) -> str:
    """Return the type and the message of an error in one line, such as `ValueError: bad`.

    >>> first_line(ValueError("bad"))
    'ValueError: bad'
    """
    return traceback.format_exception_only(error)[0].strip().splitlines()[0][:300]


def error_location(error: BaseException, folder: Path) -> str:
    """Return the file and line where an error was raised, such as `file.py:12`. `folder` is the
    user's folder of hook files.

    If the stack has frames in files of this folder, the location is that of the innermost such
    frame. Otherwise it is the location of the innermost frame in any file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)] or list(frames)
    if not own:
        return "unknown place"
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


class _HookSource(importlib.machinery.SourceFileLoader):
    """Loader that imports a hook file from the text that the proxy has read. It neither reads nor
    writes bytecode files, because they belong to the text on disk. The text on disk may differ."""

    def __init__(self, name: str, file: Path, text: bytes) -> None:
        super().__init__(name, str(file))
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"{path}: the text is not that of the file")


class _HookFinder(importlib.abc.MetaPathFinder):
    """Import finder that finds a hook file when another hook file imports it by its name."""

    def __init__(self, files: HookFiles) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self._files.folder / f"{fullname}.py"
        text = None if path is not None else self._files.texts.get(file)
        return None if text is None else _spec(fullname, file, text)


def _spec(name: str, file: Path, text: bytes) -> importlib.machinery.ModuleSpec:
    spec = importlib.util.spec_from_file_location(name, file, loader=_HookSource(name, file, text))
    assert spec is not None, f"no loader for {file}"
    return spec


def _index_of_path_finder() -> int:
    """Return the index in `sys.meta_path` of the finder that searches `sys.path`. A finder that is
    inserted at this index takes precedence over `sys.path`, but not over built-in modules."""
    finders: list[object] = list(sys.meta_path)
    path_finder: object = importlib.machinery.PathFinder
    return finders.index(path_finder) if path_finder in finders else len(finders)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix != ".py":
            raise HookError(f"{path}: not a .py file; name a .py file or a folder of them")
        return [path]
    if not path.is_dir():
        raise HookError(f"{path}: no such file or folder; give the path of your hooks")
    # editors leave links without a target, such as `.#hook.py`
    files = sorted(file for file in path.glob("*.py") if file.is_file())
    if not files:
        raise HookError(f"{path}: no .py file in this folder; put `{REWARD}.py` there")
    return files


def _read(file: Path) -> bytes:
    """Return the content of a hook file. Raises HookError if the file cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise HookError(f"{file}: cannot be read ({error.strerror}); fix or move it") from None


@contextmanager
def importable(files: HookFiles) -> Generator[None]:
    """Let `import` find the hook files `files` by their names within a `with` block. The text in
    `files` is imported, even if the file on disk has another text. Other modules of the folder are
    imported from disk."""
    finder, folder = _HookFinder(files), str(files.folder)
    sys.meta_path.insert(_index_of_path_finder(), finder)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        sys.meta_path.remove(finder)


def _find(name: str, files: HookFiles) -> Hook | None:
    texts = files.texts
    for file, text in texts.items():
        if file.stem == name or len(texts) == 1:
            hook = getattr(_import(file, text), name, None)
            if hook is not None:
                return _checked_callable(hook, name, file)
    others = [
        file
        for file, text in texts.items()
        if file.stem != name and name in _top_level_names(file, text)
    ]
    if len(others) > 1:
        names = " and ".join(file.name for file in others)
        remedy = "keep one, or name one file instead of the folder"
        raise HookError(f"{others[0].parent}: `{name}` is in {names}; {remedy}")
    if not others:
        return None
    module = _import(others[0], texts[others[0]])
    return _checked_callable(getattr(module, name, None), name, others[0])


def _checked_callable(hook: Any, name: str, file: Path) -> Hook:
    if not callable(hook):
        raise HookError(f"{file}: `{name}` is not a function; define it with `def {name}(…)`")
    return hook


def _import(file: Path, text: bytes) -> ModuleType:
    """Import a hook file as a module, and return the module. The module has the file's name. If
    another hook file has already imported this file under this name, return the existing
    module."""
    imported = sys.modules.get(file.stem)
    if imported is not None and getattr(imported, "__file__", None) == str(file):
        return imported
    # A hook file named json.py must not replace the library of that name.
    name = file.stem if imported is None else f"fakevllm_hook_{file.stem}"
    spec = _spec(name, file, text)
    assert spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[name]
        raise _syntax_error(error, file) from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # isolates: it is user code
        del sys.modules[name]
        is_missing = isinstance(error, ModuleNotFoundError)
        remedy = "install it beside fakevllm" if is_missing else "fix the file"
        where = f"{file.parent}/{error_location(error, file.parent)}"
        message = f"{where}: importing the hook raised {first_line(error)}; {remedy}"
        raise HookError(message) from error
    return module


def _syntax_error(error: SyntaxError, file: Path) -> HookError:
    where = f"{error.filename or file}:{error.lineno or 1}"
    return HookError(f"{where}: {error.msg}; fix the syntax of this line")


def _top_level_names(file: Path, text: bytes) -> set[str]:
    """Return the names that a file defines or imports outside of functions and classes. The file is
    parsed and not run."""
    try:
        tree = ast.parse(text, str(file))
    except SyntaxError as error:
        raise _syntax_error(error, file) from error
    return set(_bound_names(tree.body))


def _bound_names(body: Sequence[ast.AST]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.ClassDef():
                pass
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case _:
                yield from _bound_names(list(ast.iter_child_nodes(node)))


def _arity(hook: Hook, name: str, folder: Path, forms: dict[int, str]) -> int:
    """Return the number of arguments with which the hook must be called. The keys of `forms` are
    the possible numbers, and its values are signatures for the error message. The result is the
    first of these numbers that the hook accepts.

    If the signature of the hook is unknown, as for some builtins, the result is the first number.
    Raises HookError if the hook accepts none of the numbers.
    """
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return next(iter(forms))
    for count in forms:
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count
    code = getattr(hook, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if code else str(folder)
    wanted = " or ".join(forms.values())
    raise HookError(f"{where}: `{name}{signature}` has the wrong parameters; give it {wanted}")
