"""LLVM IR to code: for this machine, lesser ones, and different ones; from memory, and from
disk."""

import contextlib
import ctypes
import errno
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ensembleode.engines.compiled.llvm import compiler, machine, object_cache
from ensembleode.engines.compiled.llvm.compiler import assembly, compiled, CompileError, ptx
from ensembleode.engines.compiled.llvm.machine import gpu
from ensembleode.engines.compiled.xla import ptxas
from ensembleode.ground import files

from .kernels import axpy, fresh
from .machines import LEVELS, limited, TARGETS


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    """A cache of the test's own."""
    monkeypatch.setenv(object_cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(object_cache, "_refused", set())
    return tmp_path / "kernels"


@pytest.fixture
def forget(monkeypatch):
    return lambda: monkeypatch.setattr(compiler, "_codes", {})


def run(code, n=1001):
    """`y` and the sum, of whole numbers: so no machine rounds."""
    x, y, s = np.arange(n, dtype=float), np.full(n, np.nan), np.full(1, np.nan)
    arrays = (np.array([2.0]), x, np.array([n]), y, s)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5)(code.address("axpy"))
    function(*(array.ctypes.data for array in arrays))
    np.testing.assert_array_equal(y, 2 * x + 1)
    assert s[0] == x.sum()


def test_this_machine():
    here = machine.host()
    assert machine.current() is here
    assert here.vector_bytes in (16, 32, 64)
    assert here.lanes(np.dtype(np.float32)) == here.vector_bytes // 4
    for width in (1, 2, 8, 64):
        run(compiled(axpy(width)))


def levels():
    """The levels of x86 that this machine can run."""
    here = machine.host()
    if here.architecture != "x86_64":
        return []
    return [x for x in LEVELS if TARGETS[x].vector_bytes <= here.vector_bytes]


@pytest.mark.skipif(not levels(), reason="not x86-64")
def test_lesser_machines():
    """They run here, and have no registers that they shouldn't."""
    widest = {16: "xmm", 32: "ymm", 64: "zmm"}
    for level in levels():
        lesser = limited(level)
        with machine.using(lesser):
            assert machine.current() is lesser
            code = compiled(axpy(8))
        run(code)
        assert code is not compiled(axpy(8))
        registers = set(re.findall(r"[xyz]mm", assembly(axpy(8), lesser)))
        assert max(registers) == widest[lesser.vector_bytes]
    assert machine.current() is machine.host()
    assert not limited("x86-64").has_fma
    for level in set(LEVELS) - set(levels()):
        with pytest.raises(ValueError, match=f"can't run code for {level}"):
            limited(level)


RANGE = """
define void @largest(ptr %x) {
  %a = load <16 x float>, ptr %x
  %b = call <16 x float> @llvm.x86.avx512.mask.range.ps.512(<16 x float> %a, <16 x float> %a,
    i32 11, <16 x float> zeroinitializer, i16 -1, i32 4)
  store <16 x float> %b, ptr %x
  ret void
}
declare <16 x float> @llvm.x86.avx512.mask.range.ps.512(<16 x float>, <16 x float>, i32,
  <16 x float>, i16, i32)
"""


@pytest.mark.parametrize("target", ["x86-64-v3", "aarch64-linux"])
def test_code_of_a_better_machine(target):
    """Kernels of a client with AVX-512 are refused by a worker without it, which lives on."""
    with pytest.raises(CompileError, match=r"has no llvm\.x86\.avx512"):
        assembly(RANGE, TARGETS[target])
    assert "vrangeps" in assembly(RANGE, TARGETS["x86-64-v4"])


def test_other_machines():
    """ARM and Windows: an instruction that only they have, and their order of parameters."""
    assert "fmla" in assembly(axpy(8), TARGETS["aarch64-linux"])
    assert "_axpy" in assembly(axpy(8), TARGETS["aarch64-macos"])
    windows = assembly(axpy(8), TARGETS["x86-64-v3-windows"])
    # The first parameter.
    assert "(%rcx)" in windows
    assert "(%rdi)" not in windows
    assert "(%rdi)" in assembly(axpy(8), TARGETS["x86-64-v3"])
    with pytest.raises(CompileError, match="can't run here"):
        compiled(axpy(8), next(x for x in TARGETS.values() if x.triple != machine.host().triple))


@pytest.mark.parametrize(
    ("arch", "version"), [("sm_80", "7.8"), ("sm_90", "7.8"), ("sm_100", "8.6")]
)
def test_ptx(arch, version):
    code = ptx(axpy(1, is_gpu=True), arch)
    assert ".visible .entry axpy(" in code
    assert re.search(rf"^\.version {version}$", code, re.MULTILINE)
    assert re.search(rf"^\.target {arch}$", code, re.MULTILINE)
    assert gpu(arch.replace("sm", "compute")) == gpu(arch)
    if not ptxas.available():
        pytest.skip("no ptxas")
    used = ptxas.usage(code, arch)["axpy"]
    assert 8 <= used.registers <= 64
    assert (used.spill_stores, used.spill_loads) == (0, 0)
    with pytest.raises(ptxas.PtxasError, match="ptxas"):
        ptxas.usage(code.replace(".entry", ".nonsense"), arch)


def test_no_such_gpu():
    with pytest.raises(ValueError, match="'gfx90a'"):
        ptx(axpy(1, is_gpu=True), "gfx90a")


def function(body, *declarations):
    return "\n".join([*declarations, "define void @f(ptr %x) {", body, "  ret void", "}"])


def calling(name):
    """Of a function of one double."""
    return function(
        f"  %a = load double, ptr %x\n  %b = call double @{name}(double %a)\n"
        "  store double %b, ptr %x",
        f"declare double @{name}(double)",
    )


WRONG = [
    (function("  %y = frobnicate i32 1"), "%y = frobnicate i32 1"),
    (function("  %y = add i32 1, %unknown"), "undefined value '%unknown'"),
    (function("  %y = add i32 %z, 1\n  %z = add i32 1, 1"), "%z = add i32 1, 1"),
    (calling("not_there_at_all"), "not_there_at_all"),
    (calling("llvm.nvvm.sqrt.rn.d"), "has no llvm.nvvm.sqrt.rn.d"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_errors_are_llvms(text, says):
    with pytest.raises(CompileError, match=re.escape(says)):
        compiled(text)


@pytest.mark.slow
def test_errors_can_be_collected():
    """In cycles, as they are kept with the frames that they came from, whatever goes first."""
    texts = [text for text, _ in WRONG]
    said = fresh(
        "import gc\n"
        "from ensembleode.engines.compiled.llvm.compiler import compiled, CompileError\n"
        f"for text in {texts!r} * 10:\n"
        "    try: compiled(text)\n"
        "    except CompileError as e: e.itself = e\n"
        "print(gc.collect() > 0)"
    )
    assert said == "True"


def test_long_errors_are_cut():
    text = function(
        "\n".join(f"  %y{i} = add i32 %z{i}, 1\n  %z{i} = add i32 1, 1" for i in range(40))
    )
    with pytest.raises(CompileError, match=r"and \d+ lines more") as caught:
        compiled(text)
    assert len(str(caught.value).splitlines()) < 30


@pytest.mark.parametrize("name", ["llvm.sin.f64", "llvm.exp.f64", "llvm.log.f64", "sin"])
def test_a_gpu_has_no_libm(name):
    with pytest.raises(CompileError, match=f"sm_90 has no {name}"):
        ptx(calling(name), "sm_90")
    # (A CPU has.)
    x = np.array([0.5])
    code = compiled(calling(name))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address("f"))(x.ctypes.data)
    numpys = getattr(np, name.removeprefix("llvm.").removesuffix(".f64"))
    np.testing.assert_allclose(x[0], numpys(0.5), rtol=1e-15)


@pytest.mark.slow
def test_without_llvmlite():
    """What would have been compiled is solved by diffrax, which is said once."""
    said = fresh(
        "import sys; sys.modules['llvmlite'] = None\n"
        "import ensembleode\n"
        "from ensembleode.engines.compiled.llvm import compiler\n"
        "print(compiler.available())\n"
        "try: compiler.compiled('')\n"
        "except compiler.CompileError as e: print(e)\n"
        "import logging; logging.basicConfig(stream=sys.stdout)\n"
        "prob = ensembleode.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))\n"
        "for _ in range(2): print(ensembleode.solve(prob).engine)"
    )
    first, second, warned, *solved = said.splitlines()
    assert "pip install llvmlite" in first
    assert second == first
    assert first in warned
    assert "diffrax takes the place of the compiled engine" in warned
    assert [x.partition(" ")[0] for x in solved] == ["diffrax", "diffrax"]


def test_an_old_llvm(monkeypatch):
    import llvmlite.binding as llvm

    assert compiler.available() is None
    monkeypatch.setattr(llvm, "llvm_version_info", (15, 0, 7))
    compiler.available.cache_clear()
    try:
        assert "LLVM 15, and 20 or later" in compiler.available()
    finally:
        compiler.available.cache_clear()


def test_compiled_once(forget):
    forget()
    text = axpy(4, 7.0)
    with ThreadPoolExecutor(4) as threads:
        codes = list(threads.map(lambda i: compiled(text if i % 2 else axpy(4, 8.0 + i)), range(8)))
    assert len({id(code) for code in codes[1::2]}) == 1
    assert len({code.key for code in codes}) == 5
    assert all(code.origin == "compiled" for code in codes)


REUSED = """
from ensembleode.engines.compiled.llvm import compiler
from tests.engines.compiled.kernels import axpy
from tests.engines.compiled.test_compiler import run
def refuse(*args, **options): raise AssertionError("compiled again")
compiler._optimised = refuse
code = compiler.compiled(axpy(8))
run(code)
print(code.origin)
"""


@pytest.mark.slow
def test_a_fresh_process_has_it_from_disk(forget):
    forget()
    assert compiled(axpy(8)).origin == "compiled"
    assert fresh(REUSED) == "disk"


def test_other_machines_have_their_own_on_disk(forget, directory):
    forget()
    for level in levels():
        assert compiled(axpy(8), limited(level)).origin == "compiled"
    assert len(list(directory.iterdir())) == len(levels())


def test_damaged_files_are_written_anew(forget, directory):
    forget()
    compiled(axpy(8))
    (path,) = directory.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    forget()
    assert compiled(axpy(8)).origin == "compiled"
    assert path.read_bytes() == content
    forget()
    code = compiled(axpy(8))
    assert code.origin == "disk"
    run(code)


def test_a_file_that_is_not_what_was_saved_is_not_run(forget, directory):
    """Whatever byte of it is another, wherever it ends, and under another kernel's name."""
    keys = "a" * 64, "b" * 64
    for i, key in enumerate(keys):
        object_cache.save(key, bytes([i]) * 20)
    one, other = (directory / f"{key}.o" for key in keys)
    content = one.read_bytes()
    assert object_cache.load(keys[0]) == bytes(20)
    for i in range(len(content)):
        flipped = bytes([content[i] ^ 1 << i % 8])
        for damaged in (content[:i], content[:i] + flipped + content[i + 1 :]):
            one.write_bytes(damaged)
            assert object_cache.load(keys[0]) is None
    for damaged in (content + b"\0", other.read_bytes()):
        one.write_bytes(damaged)
        assert object_cache.load(keys[0]) is None


SOMEBODY = 12345
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)


def given_away(path):
    os.chown(path, SOMEBODY, -1)


def linked(path):
    """A link to a file of somebody else."""
    theirs = path.parent.parent / f"theirs {path.name}"
    path.rename(theirs)
    given_away(theirs)
    path.symlink_to(theirs)


@pytest.mark.quick_cases(2)
@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
@pytest.mark.parametrize("of_folder", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda path: path.chmod(0o770), id="group"),
        pytest.param(lambda path: path.chmod(0o707), id="all"),
        pytest.param(given_away, marks=as_root, id="owner"),
        pytest.param(linked, marks=as_root, id="link"),
    ],
)
def test_what_others_could_have_written_is_not_run(forget, directory, change, of_folder, caplog):
    """Said in one line. A file is written anew, for oneself; a folder is left alone."""
    texts = axpy(8), axpy(8, 5.0)
    forget()
    for text in texts:
        compiled(text)
    for path in [directory] if of_folder else list(directory.iterdir()):
        change(path)
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    forget()
    for text in texts:
        assert compiled(text).origin == "compiled"
    run(compiled(texts[0]))
    (line,) = [x for x in caplog.records if x.levelname == "WARNING"]
    assert "is not run, but compiled anew" in line.message
    assert str(directory) in line.message
    if of_folder:
        assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    else:
        forget()
        assert {compiled(text).origin for text in texts} == {"disk"}
        assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_what_it_makes_it_takes_back(forget, directory, monkeypatch, mask):
    """Whatever the umask, and with folders above that are still to be made."""
    monkeypatch.setenv(object_cache.VARIABLE, str(directory / "a" / "b"))
    before = os.umask(mask)
    try:
        forget()
        compiled(axpy(8))
    finally:
        os.umask(before)
    forget()
    assert compiled(axpy(8)).origin == "disk"


def test_unreadable_files(forget, directory):
    forget()
    compiled(axpy(8))
    (path,) = directory.iterdir()
    path.unlink()
    path.mkdir()
    forget()
    assert compiled(axpy(8)).origin == "compiled"


def test_code_may_go_while_another_thread_compiles(forget):
    """The collector frees it, on any thread, and waits for nobody."""
    forget()
    compiled(axpy(8))
    with compiler._lock, ThreadPoolExecutor() as pool:
        pool.submit(compiler._codes.clear).result(timeout=60)
        assert len(compiler._gone) == 1
    run(compiled(axpy(8)))
    assert not compiler._gone


def test_a_directory_that_cant_be(forget, monkeypatch, tmp_path):
    forget()
    (tmp_path / "file").touch()
    monkeypatch.setenv(object_cache.VARIABLE, str(tmp_path / "file" / "below"))
    run(compiled(axpy(8)))


def test_a_full_disk(forget, monkeypatch, directory):
    forget()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", full)
        run(compiled(axpy(8)))
    assert list(directory.iterdir()) == []
    forget()
    assert compiled(axpy(8)).origin == "compiled"
    assert len(list(directory.iterdir())) == 1


def test_the_directory(monkeypatch, tmp_path):
    monkeypatch.setenv(object_cache.VARIABLE, "")
    assert object_cache.directory() is None
    object_cache.save("key", b"code")
    assert object_cache.load("key") is None
    monkeypatch.delenv(object_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(object_cache.sys, "platform", "linux")
    assert object_cache.directory() == tmp_path / "ensembleode" / "kernels"
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setattr(object_cache.sys, "platform", "win32")
    assert object_cache.directory() == tmp_path / "local" / "ensembleode" / "kernels"


def test_what_was_used_least_recently_goes(monkeypatch, directory):
    monkeypatch.setattr(object_cache, "MOST", 3500)
    monkeypatch.setattr(object_cache, "_EACH", 1)
    for i, key in enumerate("abc"):
        object_cache.save(key, bytes(1000))
        with contextlib.suppress(FileNotFoundError):
            os.utime(directory / f"{key}.o", (i, i))
    (directory / ".left.partial").touch()
    os.utime(directory / ".left.partial", (0, 0))
    assert object_cache.load("a") == bytes(1000)  # used
    object_cache.save("d", bytes(1000))
    assert {path.name for path in directory.iterdir()} == {"a.o", "c.o", "d.o"}
