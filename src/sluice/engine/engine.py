"""Opens a model within a budget and turns token ids into logits and tokens; knows no command line, no printing."""

from __future__ import annotations

import operator
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from sluice.config import EngineConfig, usable_cores
from sluice.engine import placing
from sluice.engine.budget import MemoryNeeds, MemoryPlan, plan_memory
from sluice.engine.device_share import DeviceShare
from sluice.engine.device_site import Sizes
from sluice.engine.division import layers_of
from sluice.engine.generate import Generation, Token
from sluice.engine.ledger import PhaseLedger
from sluice.engine.pairs import PAIR_LIMIT, ROW_MAP_BYTES, PairGraphs, scratch_bytes
from sluice.engine.prerouting import HeadGraphs, Prerouting
from sluice.engine.recorded import RecordedRoutes
from sluice.engine.recording import begin_step, open_trace
from sluice.engine.segments import SegmentGraphs
from sluice.engine.session import Session
from sluice.engine.step import Each
from sluice.engine.weights import DenseWeights, dense_tensors
from sluice.engine.workspace import CHUNK, Workspace, chunks
from sluice.errors import ContextError, EngineClosed, InputError, ModelFileError, ReadError, TemplateError
from sluice.experts.policies import pinning, reads_ahead, suited
from sluice.experts.rerouting import Rerouting
from sluice.ggml import Backend, GraphAllocator, Library, load_library
from sluice.gguf import GgufFile, open_gguf
from sluice.io import readers
from sluice.io.files import ModelFiles
from sluice.io.fixed_rate import FixedRateFiles
from sluice.memory import free_bytes, page_cache_bytes, rss_bytes
from sluice.models import family_of
from sluice.models.fingerprint import fingerprint
from sluice.models.kv_cache import KV_TYPES, KVCache, kv_bytes
from sluice.models.recurrent import RecurrentState, recurrent_bytes
from sluice.models.spec import ModelSpec
from sluice.routing.heads import Heads
from sluice.routing.lora import LoraWeights
from sluice.routing.lora_file import Adapter, open_adapter
from sluice.routing.prerouter_file import PrerouterFile, open_prerouter
from sluice.store import ExpertStore, ReaderFactory, expert_layout
from sluice.text.chat import guard_messages, render_chat
from sluice.text.sampling import SamplingParams
from sluice.text.tokenizer import Tokenizer
from sluice.trace.writer import ENCODER_BYTES, TraceWriter
from sluice.vram import DevicePool

DEFAULT_CTX = 4096
OUTPUT_ROWS = 16  # logits rows in the workspace, at least one a stream


class Engine:
    """A model, open and ready; a context manager, used by one thread at a time.

    `plan` says how the memory was divided, `spec` what the model is, `mode` every knob that can change the output,
    `policy` who chooses what leaves the pool, `prefetching` whether reads are issued ahead, `placed` what a plan file
    brought into the pool and `recorder` what writes its trace (None: there is none), `free_streams` which streams no
    session has.
    With `plan_only`, opening ends there: no tensor is read, no pool made, and the engine is closed at once.
    """

    def __init__(
        self, path: str | os.PathLike[str], config: EngineConfig, *,
        progress: Callable[[int, int], None] | None = None, make_reader: ReaderFactory | None = None,
        open_files: Callable[[Sequence[Path]], ModelFiles] | None = None, plan_only: bool = False,
    ) -> None:  # fmt: skip
        began = perf_counter()
        self.config = config
        self._plan_only = plan_only
        self._open_files = open_files
        self._stack = ExitStack()
        self._owner = os.getpid()
        self._closed = False
        # an engine that nobody closed ends with its last reference, or with the process
        weakref.finalize(self, _close, self._stack, self._owner)
        try:
            self._open(path, progress, make_reader)
        except BaseException:
            self.close()
            raise
        if plan_only:
            self.close()
        self.load_s = perf_counter() - began

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, ram: int | str | None = None,
        progress: Callable[[int, int], None] | None = None, **options: Any,
    ) -> Engine:  # fmt: skip
        """Open the model at `path`. `ram` in bytes, or as "4G"; other options are EngineConfig's fields.

        Raises ModelFileError, BudgetError, InputError or GgmlError, each saying what to do.
        """
        from sluice.config import parse_size

        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise InputError(
                f"unknown option {unknown[0]!r}: choose from {', '.join(EngineConfig.__dataclass_fields__)}"
            )
        size = parse_size(ram) if isinstance(ram, str) else ram
        return cls(path, EngineConfig(ram=size, **options), progress=progress)

    def _open(
        self,
        path: str | os.PathLike[str],
        progress: Callable[[int, int], None] | None,
        make_reader: ReaderFactory | None,
    ) -> None:
        config, enter = self.config, self._stack.enter_context
        self.library: Library = load_library(config.ggml)
        self.file: GgufFile = open_gguf(path, self.library)
        family_type = family_of(self.file)
        self.spec = spec = family_type.read_spec(self.file)
        self.own_top_k = spec.top_k
        if config.top_k_experts is not None:
            self.spec = spec = _with_top_k(spec, config.top_k_experts)
        rerouting = None if config.reroute is None else Rerouting(config.reroute, config.reroute_keep)
        if rerouting is not None and rerouting.keep > spec.top_k:
            raise InputError(f"--reroute keeps {rerouting.keep} experts of {spec.top_k} that a token takes: keep fewer")
        self.placement = None if config.plan is None else placing.read_for(config.plan, self._model)
        if self.placement is not None:
            self.config = config = replace(config, policy=self.placement.policy)
        self.adapters = [(open_adapter(p, self.file, spec, self.library), scale) for p, scale in config.lora]
        self.tokenizer = Tokenizer.from_metadata(self.file.metadata)
        if self.tokenizer.n_vocab > spec.n_vocab:
            raise ModelFileError(
                f"{self.file.paths[0]}: lists {self.tokenizer.n_vocab} tokens and embeds {spec.n_vocab}: "
                "the file is damaged or badly converted"
            )
        self.n_ctx = min(spec.n_ctx_train, DEFAULT_CTX) if config.ctx is None else config.ctx
        if self.n_ctx > spec.n_ctx_train:
            raise InputError(f"--ctx {self.n_ctx} exceeds the {spec.n_ctx_train} positions the model knows: lower it")
        self.threads = config.threads or min(usable_cores(), 16)
        kv_types = tuple(KV_TYPES[name] for name in config.kv_names)
        for shape in spec.kv_shapes_used:
            for name, type, dim in zip(config.kv_names, kv_types, (shape.head_dim, shape.head_dim_v), strict=True):
                if dim % (block := self.library.ggml_blck_size(type)):
                    raise InputError(
                        f"--kv {name} needs heads of a multiple of {block}, this model's have {dim}: use f16"
                    )
        n_tokens = max(min(CHUNK, self.n_ctx), config.streams)
        n_outputs = min(max(OUTPUT_ROWS, config.streams), n_tokens)

        # All memory is set out first, untouched; only when the budget holds it is anything read.
        if self._open_files is not None:
            self.files: ModelFiles = enter(self._open_files(self.file.paths))
        elif config.read_rate is not None:
            self.files = enter(FixedRateFiles(self.file.paths, config.read_rate))
        else:
            self.files = enter(ModelFiles(self.file.paths))
        blocks = [self.files[i].block for i in range(len(self.files))]
        layout = expert_layout(self.file, spec.moe_layers, blocks)
        self.recorder: TraceWriter | None = None
        if config.trace is not None and not self._plan_only:
            self.recorder = enter(open_trace(config.trace, config, self.file, spec, n_tokens))
        recording = None if config.routes is None else self._read_routes(config.routes)  # takes what pyarrow does too
        process = rss_bytes() + (ENCODER_BYTES if self.recorder is not None else 0)
        backend = enter(Backend(self.library, self.threads))
        lora = enter(LoraWeights(self.library, self.adapters)) if self.adapters else None
        expert_updates = {} if lora is None else lora.experts
        expert_rank = lora.rank if lora is not None and expert_updates else 0
        self.chunk_room = n_tokens  # tokens that a step takes at most
        workspace = enter(
            Workspace(
                self.library, spec, n_tokens=n_tokens, n_streams=config.streams, n_ctx=self.n_ctx, n_outputs=n_outputs,
                recording=self.recorder is not None, ahead=config.prerouter is not None or config.routes is not None,
                expert_ids=bool(expert_updates),
            )
        )  # fmt: skip
        n_pairs = min(PAIR_LIMIT, n_tokens * spec.top_k)
        sizes = Sizes(n_tokens, self.n_ctx, config.streams, (kv_types[0], kv_types[1]), config.prefetch)
        dense = dense_tensors(self.file, spec)
        share = enter(
            DeviceShare.open(self.file, self.library, config, family_type, spec, dense, workspace, sizes, n_pairs)
        )
        self._share = share
        process += share.process_bytes
        own, layers = share.host_segments, layers_of(spec, share.host_segments)
        weights = enter(DenseWeights(self.library, share.host_tensors(dense)))
        if lora is not None:
            lora.attach(weights.tensors)
        family = family_type(spec, weights.tensors)
        self._kv = kv = enter(KVCache(self.library, spec, sizes.kv_types, self.n_ctx, config.streams, layers=layers))
        self._states = states = enter(RecurrentState(self.library, spec, config.streams, layers=layers))
        prerouter = None if config.prerouter is None else self._read_prerouter(config.prerouter)
        heads = None if prerouter is None else enter(Heads(self.library, prerouter))
        allocator = enter(GraphAllocator(backend))
        segments = enter(SegmentGraphs(family, workspace, kv, states, allocator, lookahead=config.prefetch, only=own))
        segments.reserve(n_tokens, self.n_ctx, config.streams)
        head_graphs = None if heads is None else enter(HeadGraphs(family, heads, workspace, allocator))
        if head_graphs is not None:
            head_graphs.reserve(config.streams)
        needs = MemoryNeeds(
            process=process,
            dense=weights.n_bytes,
            kv=kv_bytes(spec, self.library, sizes.kv_types, self.n_ctx, config.streams, layers)
            + recurrent_bytes(spec, config.streams, layers),
            workspace=workspace.n_bytes,
            scratch=max(allocator.n_bytes, scratch_bytes(spec, n_pairs, expert_rank)),
            work=ROW_MAP_BYTES + n_tokens * max(spec.n_embd, spec.n_ff, spec.mixer_width) * 4,
            heads=0 if heads is None else heads.n_bytes,
            adapters=0 if lora is None else lora.n_bytes,
            beside=config.beside,
        )
        self.plan: MemoryPlan = plan_memory(
            needs, layout.stride, ram=config.ram, free=free_bytes(), expert_slots=config.expert_slots,
            least_slots=spec.top_k, floor_slots=len(spec.moe_layers) * spec.top_k,
            all_slots=len(spec.moe_layers) * spec.n_expert, share=config.pool_share,
        )  # fmt: skip
        step_demand = config.streams * self.plan.floor_slots
        self.policy = suited(config.policy, self.plan.slots, step_demand)
        self.prefetching = config.prefetch and reads_ahead(self.policy, self.plan.slots, step_demand)
        reserve = min(config.streams * spec.top_k, spec.n_expert, self.plan.slots)
        if self.placement is not None and config.plan is not None:
            self.placement = self.placement.fitted(self.plan.slots, reserve, config.plan)
        if self._plan_only:
            return
        segments.lookahead = self.prefetching
        share.look_ahead(self.prefetching)
        pins = () if self.placement is None else self.placement.pins
        policy = pinning(pins, self.policy, n_slots=self.plan.slots, n_layers=spec.n_layers)
        reader = partial(readers.make_reader, how=config.reader, threads=config.io_threads, in_place=layout.in_place)
        self.store = enter(
            ExpertStore(
                self.library, self.files, layout, self.plan.slots, policy, make_reader or reader,
                reserve=reserve, poison=config.poison,
            )
        )  # fmt: skip
        pairs = enter(PairGraphs(family, workspace, self.store, allocator, expert_updates))
        pairs.reserve(n_pairs)
        if lora is not None:
            lora.load()
        self.placed = placing.load(weights, self.files, self.store, self.placement, config.plan, progress)
        self.prerouting: Prerouting | None = None
        if heads is not None:
            heads.load()
        if heads is not None or config.routes is not None:
            decides = config.routing == "prerouted"
            self.prerouting = Prerouting(
                spec, workspace, config.streams, decides=decides, heads=heads, recording=recording
            )
            segments.predicted = frozenset(self.prerouting.owners.values() if decides else ())
            segments.scored = self.prerouting.scored
        share.load(self.files, self.store, workspace, pairs, backend, policy=self.policy)
        self._stepper = share.stepper(
            spec, segments, pairs, workspace, self.store, backend, prefetch=self.prefetching, overlap=config.overlap,
            recorder=self.recorder, prerouting=self.prerouting, heads=head_graphs, reads_routes=config.prefetch,
            rerouting=rerouting,
        )  # fmt: skip
        self.ledger = {"prefill": PhaseLedger(), "decode": PhaseLedger()}
        self.free_streams = list(range(config.streams - 1, -1, -1))
        self._n_sessions = 0

    def _read_prerouter(self, path: Path) -> PrerouterFile:
        """The heads in `path`, which must be this model's. Raises InputError."""
        file = open_prerouter(path)
        file.check_model(self.spec, fingerprint=self.fingerprint, name=self._model["name"], top_k=self.own_top_k)
        return file

    def _read_routes(self, path: Path) -> RecordedRoutes:
        spec = self.spec
        return RecordedRoutes(
            path, fingerprint=self.fingerprint, moe_layers=spec.moe_layers, n_expert=spec.n_expert, top_k=spec.top_k
        )

    # --- life

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading, join threads, free memory. May be called again."""
        self._closed = True
        _close(self._stack, self._owner)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed: open it again")
        if os.getpid() != self._owner:  # a fork has none of its parent's threads
            raise EngineClosed("the engine was opened by another process: open one in this process")

    # --- sessions

    def session(self) -> Session:
        """Take a free stream. Raises InputError when all are taken."""
        self._check_open()
        if not self.free_streams:
            raise InputError(f"all {self.config.streams} streams are in use: open the engine with more streams")
        self._n_sessions += 1
        session = Session(self, self.free_streams.pop(), self._n_sessions - 1)
        if self.prerouting is not None:
            self.prerouting.opened(session.stream, session.number)
        return session

    def copy_kept(self, source: int, target: int, n: int) -> None:
        """What a stream keeps of its first `n` positions, for another to begin with. Use Session.copy."""
        self._check_open()
        self._kv.copy(source, target, n)
        if self.spec.recurrent:
            self._states.copy(source, target)
        self._share.copy_kept(source, target, n)

    # --- steps

    def _step(
        self, phase: str, parts: Sequence[tuple[Session, Sequence[int]]], outputs: Sequence[int],
        each: Each | None = None,
    ) -> np.ndarray:  # fmt: skip
        self._check_open()
        if not parts:
            raise InputError("a step takes at least one session")
        if any(session.engine is not self for session, _ in parts):
            raise InputError("a step takes its own engine's sessions: one of these is another's")
        if any(session.broken for session, _ in parts):
            raise InputError("a step that failed left a session half way: rewind it, or start another")
        streams = [(session.stream, len(session.tokens), ids) for session, ids in parts]
        if len({stream for stream, _, _ in streams} - {-1}) < len(streams):
            raise InputError("a step takes open sessions, each once: one of these is closed or given twice")
        try:
            if self.recorder is not None:
                begin_step(self.recorder, self._stepper.n_steps, phase, parts)
            logits = self._stepper.run(streams, outputs, self.ledger[phase], each, decoding=phase == "decode")
            if changed := self.files.changed():
                raise ReadError(changed)
        except BaseException:
            self.store.abort()
            if self.spec.recurrent:
                for session, _ in parts:
                    session.broken = True
            raise
        for session, ids in parts:
            session.took(ids, prompt=phase == "prefill")
        return logits

    def prefill(self, session: Session, ids: Sequence[int]) -> np.ndarray:
        """Feed `ids` in chunks; logits [n_vocab] after the last. Use Session.feed, which checks that they fit."""
        [(_, logits)] = self.prefill_many([(session, ids)])
        return logits

    def prefill_rows(self, session: Session, ids: Sequence[int], use: Each, *, skip: int = 0) -> Iterator[int]:
        """Feed `ids` in chunks; `use(i, rows)` gets the logits after `ids[i]`, `ids[i + 1]`, …, a few rows at a time.

        The first `skip` tokens' logits are left out. Rows [n, n_vocab] float32 are valid during the call, and never
        more than fit the workspace. Yields after each chunk how many tokens were fed. Raises ContextError.
        With prerouted routes, or rerouting, all but a session's first token are decoded one by one: what a prompt would
        make of them isn't what they would make when generated.
        """
        session.check_room(ids)
        fed = 0
        for chunk in self._chunks(session, self._checked(ids)):

            def block(first: int, rows: np.ndarray, start: int = fed) -> None:
                first += start
                if (rest := rows[max(0, skip - first) :]).size:
                    use(max(first, skip), rest)

            wanted = range(len(chunk)) if fed + len(chunk) > skip else range(0)
            phase = "decode" if self._scores_by_decoding and session.tokens else "prefill"
            self._step(phase, [(session, chunk)], range(1) if phase == "decode" else wanted, block)
            fed += len(chunk)
            yield fed

    @property
    def _scores_by_decoding(self) -> bool:
        return self.config.reroute is not None or (self.prerouting is not None and self.prerouting.decides)

    def _chunks(self, session: Session, ids: list[int]) -> Iterator[list[int]]:
        """What is fed together when each token's logits are wanted."""
        return ([id] for id in ids) if self._scores_by_decoding else chunks(len(session.tokens), ids)

    def prefill_many(self, prompts: Sequence[tuple[Session, Sequence[int]]]) -> Iterator[tuple[int, np.ndarray]]:
        """Feed each session its prompt, short prompts together in one step, so that each expert is read once for all.

        Yields (index, logits [n_vocab] after its last token) as prompts end; the logits are valid until the next step.
        """
        waiting = deque(
            (i, session, list(chunks(len(session.tokens), self._checked(ids))))
            for i, (session, ids) in enumerate(prompts)
        )
        while waiting:
            parts: list[tuple[Session, list[int]]] = []
            ends: list[tuple[int, int]] = []
            room = self.chunk_room
            while waiting and len(waiting[0][2][0]) <= room:
                i, session, left = waiting.popleft()
                chunk = left.pop(0)
                room -= len(chunk)
                parts.append((session, chunk))
                if not left:
                    ends.append((i, len(parts) - 1))
                    continue
                waiting.appendleft((i, session, left))  # its next chunk needs this one's keys: a step of its own
                break
            logits = self._feed(parts, [part for _, part in ends])
            for row, (i, _) in enumerate(ends):
                yield i, logits[row]

    def prefill_step(self, parts: Sequence[tuple[Session, Sequence[int]]], ends: Sequence[int]) -> np.ndarray:
        """Feed each session a chunk of its prompt, all in one step: logits [len(ends), n_vocab], valid until the next.

        `ends`: which of `parts` logits are wanted of, after their last token. A session's bits don't depend on its
        company as long as chunks are cut by `chunks` (engine/workspace.py): none goes across a multiple of CHUNK.
        Raises InputError for chunks that do, or that together are more than `chunk_room`, and ContextError.
        """
        for session, ids in parts:
            session.check_room(ids)
            if len(session.tokens) % CHUNK + len(ids) > CHUNK:
                raise InputError(f"a chunk goes across a multiple of {CHUNK} positions: cut prompts with chunks()")
        if (n := sum(len(ids) for _, ids in parts)) > self.chunk_room:
            raise InputError(f"a step of prompts has {n} tokens and takes at most {self.chunk_room}")
        return self._feed([(session, self._checked(ids)) for session, ids in parts], ends)

    def _feed(self, parts: Sequence[tuple[Session, Sequence[int]]], ends: Sequence[int]) -> np.ndarray:
        """`prefill_step` of what was checked."""
        columns = list(accumulate(len(ids) for _, ids in parts))  # up to the end of each part
        return self._step("prefill", parts, [columns[part] - 1 for part in ends])

    def decode(self, sessions: Sequence[Session], ids: Sequence[int]) -> np.ndarray:
        """Feed one token to each session in one step; logits [n_sessions, n_vocab], valid until the next step."""
        ids = self._checked(ids)
        for session in sessions:
            if session.n_left < 1:
                raise ContextError(f"the context of {self.n_ctx} positions is full: raise --ctx")
        parts = [(session, [token]) for session, token in zip(sessions, ids, strict=True)]
        return self._step("decode", parts, range(len(parts)))

    def _checked(self, ids: Sequence[int]) -> list[int]:
        try:
            whole = [operator.index(i) for i in ids]
        except TypeError as error:
            raise InputError(f"token ids are whole numbers ({error}): give a list of them") from None
        for i in whole:
            if not 0 <= i < self.spec.n_vocab:
                raise InputError(f"token id {i} is outside of the vocabulary of {self.spec.n_vocab}")
        return whole

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after every token of `ids`: [n_tokens, n_vocab] float32."""
        whole = self._checked(ids)
        if not whole or len(whole) > self.n_ctx:
            raise ContextError(f"{len(whole)} tokens: give 1 to {self.n_ctx}, or raise --ctx")
        logits = np.empty((len(whole), self.spec.n_vocab), np.float32)

        def use(first: int, rows: np.ndarray) -> None:
            logits[first : first + len(rows)] = rows

        with self.session() as session:
            for _ in self.prefill_rows(session, whole, use):
                pass
        return logits

    # --- text

    def encode_prompt(self, prompt: str, *, raw: bool = False) -> list[int]:
        """Token ids of `prompt`, as one user message in the model's chat template if it has one, unless `raw`."""
        if raw or self.tokenizer.chat_template is None:
            return self.tokenizer.encode(prompt)
        return self.encode_chat([{"role": "user", "content": prompt}])

    def encode_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the answer. Raises TemplateError.

        `tools` as templates take them (OpenAI's form); `variables` are further ones that the template may read. Text
        of control tokens in messages, but for the assistant's, stays text.
        """
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            raise TemplateError("the model has no chat template: use --raw")
        text = render_chat(
            tokenizer.chat_template, guard_messages(messages, tokenizer.guarded), tools=tools,
            bos_token=self._token_text("bos"), eos_token=self._token_text("eos"), **variables,
        )  # fmt: skip
        # most templates write the start token themselves
        ids = tokenizer.encode(text, special=True, bos=False)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def _token_text(self, name: str) -> str:
        id = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not isinstance(id, int) or not 0 <= id < self.tokenizer.n_vocab:
            return ""
        return self.tokenizer.token_bytes(id).decode(errors="replace")

    def generate(
        self, prompt: str | Sequence[int], max_tokens: int = 256, *, raw: bool = False, session: Session | None = None,
        stop: str | Sequence[str] = (), ignore_eos: bool = False, **sampling: Any,
    ) -> Iterator[Token]:  # fmt: skip
        """Tokens that follow `prompt`: text (see `encode_prompt`) or ids. `sampling` are SamplingParams' fields.

        With `session`, the prompt is appended to it and the answer stays in it.
        """
        self._check_open()
        ids = self.encode_prompt(prompt, raw=raw) if isinstance(prompt, str) else self._checked(prompt)
        params = SamplingParams(**sampling)
        stop = (stop,) if isinstance(stop, str) else stop
        with ExitStack() as stack:
            own = session if session is not None else stack.enter_context(self.session())
            yield from Generation(own, ids, params, max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos)

    def save_residents(self, path: str | os.PathLike[str], *, force: bool = False) -> int:
        """Write a plan file that loads the experts resident now, as recently used as now; the number of them.

        Raises InputError if the file exists (unless `force`) or can't be written.
        """
        self._check_open()
        return placing.save(
            Path(path), self.store, self._model, policy=self.policy, plan=self.placement, force=force,
            keep=self.file.paths,
        )  # fmt: skip

    # --- results

    @cached_property
    def fingerprint(self) -> str:
        """The model's name by its routers' weights (see sluice.models.fingerprint). Raises ReadError."""
        return fingerprint(self.file, self.spec)

    @property
    def _model(self) -> dict[str, Any]:
        return placing.model_of(self.file, self.spec, self.fingerprint)

    @property
    def mode(self) -> dict[str, Any]:
        """Every knob that can change the output, resolved."""
        k, v = self.config.kv_names
        prerouter = self.config.prerouter if self.config.routing == "prerouted" else None
        return {
            "routing": self.config.routing,
            **({} if prerouter is None else {"prerouter": prerouter.name}),
            **({} if self.config.routes is None else {"routes": self.config.routes.name}),
            **self._rerouting_mode,
            "kv": f"{k},{v}",
            "threads": self.threads,
            "top_k_experts": self.spec.top_k,
            "top_k_experts_of_model": self.own_top_k,
            **self._share.mode,
            **({"lora": [_named(*one) for one in self.adapters]} if self.adapters else {}),
            "ggml": self.library.version,
        }

    @property
    def _rerouting_mode(self) -> dict[str, Any]:
        if self.config.reroute is None:
            return {}
        return {"reroute": {"margin": self.config.reroute, "keep": self.config.reroute_keep, "prefetch": False}}

    @property
    def cache_state(self) -> str | None:
        """A hash of who is in the expert pool, and in a device's slots, in the order in which they would leave now.

        None unless output depends on it, which it does with rerouting. With the policy lru it says all there is to say.
        """
        if self.config.reroute is None:
            return None
        above = [] if self.device_pool is None else [group.level.cache for group in self.device_pool.groups]
        orders = [cache.eviction_order() for cache in (self.store.cache, *above)]
        said = "\n".join("".join(f"{layer} {expert}\n" for layer, expert in order) for order in orders)
        return sha256(said.encode()).hexdigest()

    def stats(self) -> dict[str, Any]:
        """The ledger since open: {"prefill": {...}, "decode": {...}}."""
        rss, cached = rss_bytes(), page_cache_bytes()
        device = self._share.site is not None
        return {
            name: phase.as_dict(resident_bytes=rss, page_cache_bytes=cached, device=device)
            for name, phase in self.ledger.items()
        }

    @property
    def device(self) -> dict[str, Any] | None:
        """What a device has taken of the model, bytes and slots; None where there is none."""
        return self._share.facts

    @property
    def device_pool(self) -> DevicePool | None:
        """The slots on the device; None where there are none."""
        return None if self._share.site is None else self._share.site.pool

    @property
    def notes(self) -> list[str]:
        """What was decided in opening that a user should hear of, a line each."""
        return self._share.notes


def _named(adapter: Adapter, scale: float) -> dict[str, Any]:
    """What an output's JSON says of an adapter."""
    return {"file": str(adapter.path), "scale": scale, "matrices": len(adapter.updates), "ranks": list(adapter.ranks)}


def _with_top_k(spec: ModelSpec, n: int) -> ModelSpec:
    """`spec` with `n` experts a token and layer, at most the model's own number. Raises InputError."""
    if n > spec.top_k:
        raise InputError(f"--top-k-experts {n}: the model takes {spec.top_k} experts a token, give 1 to that")
    return replace(spec, top_k=n)


def _close(stack: ExitStack, owner: int) -> None:
    """Close what the process `owner` opened. In a fork of it there are no threads to join: waiting would never end."""
    if os.getpid() == owner:
        stack.close()
