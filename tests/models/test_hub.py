"""Models by name, against a small server on loopback that plays the hub, and against hand-made caches."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cake_infer.errors import CakeError, MemoryLimit, ModelNotFound, OptionError
from cake_infer.models import hub
from cake_infer.models.hub import check_name, local_model, resolve_model

COMMIT, OTHER = "a" * 40, "b" * 40
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"x": SHARDS[0], "y": SHARDS[1], "z": SHARDS[0]}}).encode()
WANTED: dict[str, bytes] = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"add_bos_token": false}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX,
    SHARDS[0]: b"first shard" * 100,
    SHARDS[1]: b"second shard" * 1000,
}
UNWANTED = {
    "README.md": b"# model",
    "consolidated.safetensors": b"c" * 500,
    "consolidated.00.pth": b"p" * 500,
    "pytorch_model.bin": b"b" * 500,
    "model.safetensors": b"\0" * 500,
    "original/params.json": b"{}",
    "tokenizer.model.v3": b"t",
}
WEIGHT_BYTES = len(WANTED[SHARDS[0]]) + len(WANTED[SHARDS[1]])


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    readers: tuple[str, ...] = ("granted",)
    cut: str | None = None  # a file whose transfer breaks off half-way


@dataclass
class FakeHub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def fetched(self) -> set[str]:
        """Names of the files whose contents were asked for."""
        return {
            path.split(f"/resolve/{COMMIT}/")[1]
            for method, path in self.requests
            if "/resolve/" in path and method == "GET"
        }


def _handler(fake: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", cut: bool = False, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self.close_connection = True

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            fake.requests.append((self.command, path))
            api = path.startswith("/api/models/")
            parts = path.removeprefix("/api/models/").strip("/").split("/")
            repo, rest = "/".join(parts[:2]), parts[2:]
            repository = fake.repositories.get(repo)
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if token == "expired":
                return self.answer(401, X_Error_Message="Invalid credentials in Authorization header")
            if repository is None or (repository.private and token not in repository.readers):
                return self.answer(404 if token else 401, X_Error_Code="RepoNotFound", X_Error_Message="Not found")
            revision = rest[1] if len(rest) > 1 else "main"
            if revision not in ("main", "v1", COMMIT):
                return self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
            entries = [(name, len(data), hashlib.sha1(data).hexdigest()) for name, data in repository.files.items()]
            if api and rest[:1] == ["tree"]:
                tree = [{"type": "file", "path": name, "size": size, "oid": oid} for name, size, oid in entries]
                return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
            if api:
                siblings = [{"rfilename": name, "size": size, "blobId": oid} for name, size, oid in entries]
                info = {"id": repo, "sha": COMMIT, "siblings": siblings, "gated": repository.gated, "tags": []}
                return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
            if repository.gated and token not in repository.readers:
                return self.answer(403 if token else 401, X_Error_Code="GatedRepo", X_Error_Message="restricted")
            name = "/".join(rest[2:])
            if name not in repository.files:
                return self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            data = repository.files[name]
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            self.answer(200, data, cut=name == repository.cut, ETag=etag, X_Repo_Commit=COMMIT)

    return Handler


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty hub, the environment pointing at it, an empty cache, an empty working folder and no token."""
    state = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    _environment(tmp_path, monkeypatch)
    monkeypatch.setenv("HF_ENDPOINT", state.url)
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HUGGINGFACE_HUB_CACHE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("CAKE_INFER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Offline by HF_HUB_OFFLINE, with sockets that fail the test if they are used; returns the cache folder."""
    _environment(tmp_path, monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def refuse(*args: Any, **keywords: Any) -> None:
        raise AssertionError("a connection was opened although HF_HUB_OFFLINE=1")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path / "hub"


def _cache(root: Path, repo: str, files: dict[str, bytes], commit: str = COMMIT, ref: str | None = COMMIT) -> Path:
    """A cache as huggingface_hub lays it out: links in a snapshot to blobs, and a reference."""
    storage = root / f"models--{repo.replace('/', '--')}"
    snapshot = storage / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (storage / "blobs").mkdir(exist_ok=True)
    for name, data in files.items():
        blob = storage / "blobs" / hashlib.sha1(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    if ref is not None:
        (storage / "refs").mkdir(exist_ok=True)
        (storage / "refs" / "main").write_text(ref)
    return snapshot


def _message(name: str, **keywords: Any) -> str:
    with pytest.raises(CakeError) as caught:
        resolve_model(name, **keywords)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- downloads ------------------------------------------------------------------------------------------------------


def test_a_download_takes_the_listed_safetensors_and_the_text_files_and_nothing_else(
    fake: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.repositories["org/name"] = Repository(WANTED | UNWANTED)
    reports: list[tuple[str, int, int]] = []
    folder = resolve_model("org/name", on_progress=lambda *report: reports.append(report))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == WANTED
    assert fake.fetched() == set(WANTED)
    total = reports[-1][2]
    assert reports[0] == ("download", 0, total)
    assert reports[-1] == ("download", total, total)
    assert total >= WEIGHT_BYTES
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_model_that_is_complete_in_the_cache_needs_no_request(fake: FakeHub) -> None:
    fake.repositories["org/name"] = Repository(WANTED)
    folder = resolve_model("org/name")
    fake.requests.clear()
    assert resolve_model("org/name") == folder
    assert local_model("org/name") == folder
    assert fake.requests == []


def test_an_alias_and_one_unsharded_file(fake: FakeHub) -> None:
    files = {name: WANTED[name] for name in ("config.json", "tokenizer.json")} | {"model.safetensors": b"weights"}
    fake.repositories["TinyLlama/TinyLlama-1.1B-Chat-v1.0"] = Repository(files | {"consolidated.safetensors": b"no"})
    folder = resolve_model("TinyLlama")
    assert {path.name for path in folder.iterdir()} == set(files)


def test_a_revision_is_what_is_fetched_and_found_again(fake: FakeHub) -> None:
    fake.repositories["org/name"] = Repository(WANTED)
    assert resolve_model("org/name", revision="v1").name == COMMIT
    fake.requests.clear()
    assert resolve_model("org/name", revision="v1") == resolve_model("org/name", revision=COMMIT)
    assert fake.requests == []
    assert "no revision 'v9'" in _message("org/name", revision="v9")


def test_the_caller_can_compare_memory_before_a_weight_is_fetched(fake: FakeHub) -> None:
    fake.repositories["org/name"] = Repository(WANTED)
    seen: list[Any] = []

    def too_large(folder: Path | None, size: int) -> None:
        assert folder is not None
        seen.append((json.loads((folder / "config.json").read_text()), size))
        raise MemoryLimit("too large")

    assert _message("org/name", before_download=too_large) == "too large"
    assert seen == [({"model_type": "llama"}, WEIGHT_BYTES)]
    assert not fake.fetched() & set(SHARDS)


def test_too_small_a_disk_is_refused_with_both_figures_before_a_weight_is_fetched(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.repositories["org/name"] = Repository(WANTED | {SHARDS[0]: b"x" * 3_000_000})
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(MemoryLimit, match=r"needs 3 MB of disk .* 1 MB are free"):
        resolve_model("org/name")
    assert not fake.fetched() & set(SHARDS)


def test_a_transfer_that_breaks_off_leaves_no_model_and_the_next_run_completes_it(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    fake.repositories["org/name"] = Repository(WANTED, cut=SHARDS[1])
    assert "broke off" in _message("org/name")
    assert local_model("org/name") is None
    fake.repositories["org/name"].cut = None
    folder = resolve_model("org/name")
    assert (folder / SHARDS[1]).read_bytes() == WANTED[SHARDS[1]]


def test_a_link_to_nothing_is_fetched_again_when_there_is_a_network(fake: FakeHub, tmp_path: Path) -> None:
    fake.repositories["org/name"] = Repository(WANTED)
    snapshot = _cache(tmp_path / "hub", "org/name", WANTED)
    (snapshot / SHARDS[1]).resolve().unlink()
    assert (resolve_model("org/name") / SHARDS[1]).read_bytes() == WANTED[SHARDS[1]]


# --- refusals, each with its own words ------------------------------------------------------------------------------


def test_a_repository_that_does_not_exist(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    text = _message("org/nothing")
    assert "no model 'org/nothing'" in text
    assert "or it is private and no token is set" in text
    monkeypatch.setenv("HF_TOKEN", "some")
    assert "or the token in use has no access" in _message("org/nothing")


def test_a_private_repository_opens_with_its_token(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.repositories["org/name"] = Repository(WANTED, private=True)
    assert "private and no token" in _message("org/name")
    monkeypatch.setenv("HF_TOKEN", "granted")
    assert resolve_model("org/name").name == COMMIT


def test_a_gated_repository_without_a_token_without_access_and_with_it(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.repositories["org/name"] = Repository(WANTED, gated=True)
    text = _message("org/name")
    assert "gated and no token is set" in text
    assert "HF_TOKEN" in text
    assert f"{fake.url}/org/name" in text
    monkeypatch.setenv("HF_TOKEN", "other")
    text = _message("org/name")
    assert "access was not granted" in text
    assert "no token" not in text
    monkeypatch.setenv("HF_TOKEN", "granted")
    assert resolve_model("org/name").name == COMMIT


def test_a_token_that_the_hub_refuses(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.repositories["org/name"] = Repository(WANTED)
    monkeypatch.setenv("HF_TOKEN", "expired")
    assert "refuses the token" in _message("org/name")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["consolidated.safetensors"], r"none of them model\.safetensors or listed"),
        (["pytorch_model.bin"], r"\.bin"),
        (["model.Q4_0.gguf"], "import-gguf"),
        ([], "no weights at all"),
    ],
)
def test_a_repository_without_safetensors_says_what_it_has(fake: FakeHub, names: list[str], expected: str) -> None:
    files = {"config.json": b"{}", "tokenizer.json": b"{}"} | dict.fromkeys(names, b"x")
    fake.repositories["org/name"] = Repository(files)
    text = _message("org/name")
    assert "has no safetensors" in text
    assert re.search(expected, text)


def test_an_index_that_names_a_file_the_repository_lacks(fake: FakeHub) -> None:
    fake.repositories["org/name"] = Repository({name: data for name, data in WANTED.items() if name != SHARDS[1]})
    assert f"names {SHARDS[1]}, which the repository does not have" in _message("org/name")


def test_a_hub_that_cannot_be_reached(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        text = _message("org/name")
    assert "cannot be reached" in text
    assert "check the connection" in text


def test_a_cache_that_cannot_be_written_is_no_matter_of_the_connection(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.repositories["org/name"] = Repository(WANTED)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file"))
    assert f"cannot write to the cache {tmp_path / 'file'}" in _message("org/name")


def test_an_unreachable_hub_leaves_the_cache_to_say_what_it_lacks(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    snapshot = _cache(tmp_path / "hub", "org/name", {key: data for key, data in WANTED.items() if key != SHARDS[0]})
    text = _message("org/name")
    assert f"{snapshot / SHARDS[0]} is missing and the hub cannot be reached" in text
    shutil.rmtree(snapshot.parents[1] / "refs")
    _cache(tmp_path / "hub", "org/name", WANTED, commit=OTHER, ref=None)
    assert f"give the option revision ({COMMIT}, {OTHER})" in _message("org/name")


# --- the cache alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ref", [COMMIT, COMMIT + "\n", None])
def test_a_cached_model_is_found_offline_by_its_reference_or_as_the_only_snapshot(
    no_network: Path, ref: str | None
) -> None:
    snapshot = _cache(no_network, "org/name", WANTED, ref=ref)
    assert resolve_model("org/name") == snapshot


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_cache_is_where_the_environment_says(
    no_network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    snapshot = _cache(tmp_path / "elsewhere" / below, "org/name", WANTED)
    assert resolve_model("org/name") == snapshot


def test_the_reference_decides_between_two_snapshots(no_network: Path) -> None:
    _cache(no_network, "org/name", WANTED, commit=OTHER, ref=None)
    snapshot = _cache(no_network, "org/name", WANTED, commit=COMMIT, ref=COMMIT)
    assert resolve_model("org/name") == snapshot
    assert resolve_model("org/name", revision=OTHER) == snapshot.parent / OTHER


def test_two_snapshots_without_a_reference_ask_for_a_revision(no_network: Path) -> None:
    snapshot = _cache(no_network, "org/name", WANTED, ref=None)
    _cache(no_network, "org/name", WANTED, commit=OTHER, ref=None)
    text = _message("org/name")
    assert "the option revision" in text
    assert COMMIT in text
    assert OTHER in text
    assert local_model("org/name") is None
    assert resolve_model("org/name", revision=COMMIT) == snapshot


@pytest.mark.parametrize("name", [SHARDS[1], "config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_link_to_nothing_is_named_offline(no_network: Path, name: str) -> None:
    snapshot = _cache(no_network, "org/name", WANTED | {"generation_config.json": b'{"a": 1}'})
    (snapshot / name).resolve().unlink()
    text = _message("org/name")
    assert f"{snapshot / name} is a link to nothing" in text
    assert local_model("org/name") is None


@pytest.mark.parametrize("name", [SHARDS[0], "config.json", "tokenizer.json"])
def test_a_file_that_was_never_cached_is_named_offline(no_network: Path, name: str) -> None:
    snapshot = _cache(no_network, "org/name", {key: data for key, data in WANTED.items() if key != name})
    assert f"{snapshot / name} is missing" in _message("org/name")


def test_what_is_not_cached_is_refused_offline(no_network: Path) -> None:
    assert "HF_HUB_OFFLINE forbids the network" in _message("org/name")
    assert "at revision v2" in _message("org/name", revision="v2")
    for name in ("org/name", "mistral-7b"):
        with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE forbids the network"):
            check_name(name)


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tinyllama", "org/name"])
def test_a_folder_wins_over_an_alias_and_a_hub_id_of_its_name(no_network: Path, name: str) -> None:
    _cache(no_network, "org/name", WANTED)
    Path(name).mkdir(parents=True)
    text = _message(name)
    assert "has no config.json (it hides the" in text
    (Path(name) / "config.json").write_text("{}")
    assert resolve_model(name) == Path(name)


@pytest.mark.parametrize("name", ["./org/name", "/nowhere/model", "~/no-such-model", "a/b/c", "models/"])
def test_a_path_that_does_not_exist_is_called_a_folder(no_network: Path, name: str) -> None:
    assert f"no folder {name}" in _message(name)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "~nobody-of-this-name"])
def test_the_home_folder_of_nobody_is_called_a_folder(no_network: Path, name: str) -> None:
    assert f"no folder {name}" in _message(name)


def test_a_name_that_is_too_long_for_a_path_is_no_model(no_network: Path) -> None:
    assert _message("a" * 5000).startswith("cannot look for the model 'aaa")


def test_a_path_object_is_never_a_hub_id_that_it_looks_like(no_network: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"mistral-7|alias"):
        resolve_model(Path("mistral-7"))


@pytest.mark.parametrize(
    ("name", "near"),
    [("mistral7b", "mistral-7b"), ("llama-3.1-8b", "llama3.1-8b"), ("qwen3", "qwen3-"), ("smollm", "smollm2-")],
)
def test_an_unknown_word_suggests_the_nearest_aliases(no_network: Path, name: str, near: str) -> None:
    text = _message(name)
    assert f"no model {name!r}" in text
    assert near in text


def test_an_unknown_word_that_resembles_nothing_points_to_the_list(no_network: Path) -> None:
    assert "cake-infer models" in _message("zzzzz")
    assert "empty" in _message(" ")


def test_a_gguf_file_is_sent_to_the_import(no_network: Path) -> None:
    Path("m.gguf").write_bytes(b"GGUF")
    assert "cake-infer import-gguf m.gguf" in _message("m.gguf")


def test_a_revision_of_something_that_has_none_is_refused(no_network: Path) -> None:
    Path("mine").mkdir()
    (Path("mine") / "config.json").write_text("{}")
    for name in ("mine", "smollm2-135m"):
        with pytest.raises(OptionError, match="the option revision"):
            resolve_model(name, revision="main")


def test_the_embedded_model_asks_before_it_is_fetched(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(hub, "ensure_embedded", lambda on_progress: order.append("fetch") or Path("there"))
    assert resolve_model("smollm2-135m", before_download=lambda *asked: order.append(asked)) == Path("there")
    assert order == [(None, 269_030_016), "fetch"]
    assert local_model("smollm2-135m") is None
