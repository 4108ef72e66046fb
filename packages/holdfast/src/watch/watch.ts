/** Watches what transactions do while they hold locks: how long, what beside their statements, and in which order. */
import { isOurs } from "../context/ours.ts";
import { HazardError } from "../seam/errors.ts";
import { keyNames } from "../seam/key.ts";
import { type OrderStep, emit, heard } from "../events/events.ts";
import {
  type Answered,
  type HazardKind,
  type Locked,
  type Section,
  type Watch,
  sectionHere,
  sections,
  watchSections,
} from "../context/section.ts";
import { type CallSite, callSites } from "../context/call-site.ts";
import type { Watching } from "./options.ts";
import {
  type LockHolding,
  type Wanted,
  follow,
  hold,
  keepOrderIn,
  letGo,
  wantedCall,
  wantedKeys,
  wantedRows,
} from "./order.ts";
import { type LockCall, keyOfCall } from "../seam/lock-calls.ts";
import { type Listener, type Sign, hearSigns, replaceFunctions } from "./signs.ts";
import { type Redact, type Savepoint, type SeenStatement, seenAs, shownStatement } from "./statement.ts";

/** The same at the same place is told once. */
const mostTold = 1000;
const told = new Set<string>();

/** What an instance is watched for, and what its sections have of it. */
class Watcher implements Watch {
  readonly watching: Watching;
  readonly show: (name: string) => string;
  readonly redact: Redact;
  /** Locks that were taken after a savepoint stay when it is rolled back to. */
  readonly keeps: boolean;
  readonly #joined = new WeakMap<object, Watched>();
  readonly #ends: (() => void)[] = [];
  readonly #always: boolean;

  constructor(watching: Watching, show: (name: string) => string, redact: Redact, keeps: boolean) {
    this.watching = watching;
    this.keeps = keeps;
    this.show = show;
    this.redact = redact;
    this.#always = this.tells || watching.orderFile !== undefined;
    this.#ends.push(watchSections());
    if (watching.hazards !== "off") this.#ends.push(heardSigns());
    if (this.tells) this.#ends.push(replacedFunctions());
    if (watching.orderFile !== undefined) keepOrderIn(watching.orderFile);
  }

  /** Whether somebody is told of each hazard, with its place. Else they are counted, and nothing is touched for it. */
  get tells(): boolean {
    return this.watching.hazards === "warn" || this.watching.hazards === "throw";
  }

  /** In production nobody may listen: then a place is not worth the time that it takes. */
  get wantsPlaces(): boolean {
    return (
      this.#always ||
      heard("holdfast:hazard") ||
      heard("holdfast:section:slow") ||
      heard("holdfast:order:inverted")
    );
  }

  /** Whether anybody is told how long statements took. */
  get wantsTimes(): boolean {
    return this.watching.slow !== undefined && heard("holdfast:section:slow");
  }

  section(site: CallSite | undefined): Section {
    return new Watched(this, site, "transaction");
  }

  joined(
    native: object,
    settled: ((then: () => void) => void) | undefined,
    site: CallSite | undefined,
  ): Section {
    const known = this.#joined.get(native);
    if (known && !known.over) return known;
    // Where nobody tells of its end, there is nothing but the order of what is locked by one `hf.join(tx)`: the next may be
    // in another transaction.
    const section = new Watched(this, site, settled ? "joined" : "unsettled");
    if (!settled) return section;
    this.#joined.set(native, section);
    settled(() => section.end());
    return section;
  }

  close(): void {
    for (const end of this.#ends.splice(0)) end();
  }
}

/** Undefined: there is nothing that it would be watched for. */
export function watch(
  watching: Watching,
  show: (name: string) => string,
  redact: Redact,
  keeps: boolean,
): Watch | undefined {
  if (watching.hazards === "off" && !watching.slow && watching.orderFile === undefined) return undefined;
  return new Watcher(watching, show, redact, keeps);
}

/** A lock by name that a statement has taken. */
interface TakenCall {
  readonly name: string;
  readonly wanted: readonly Wanted[];
  /** It stays until it is given back. */
  readonly session: boolean;
}

/** What was held when a savepoint was set. */
interface Saved {
  readonly name: string;
  readonly since: number | undefined;
  readonly locked: readonly Locked[];
  readonly tables: readonly string[];
  readonly calls: readonly TakenCall[];
  readonly holding: readonly LockHolding[];
}

class Watched implements Section {
  readonly #watcher: Watcher;
  readonly #site: CallSite | undefined;
  readonly #kind: "transaction" | "joined" | "unsettled";
  /** In whose body it was opened. */
  readonly #outer: Watched | undefined;
  #since: number | undefined;
  /** Keys, leases, and what patterns have changed. */
  #locked: Locked[] | undefined;
  /** By name, without schemas; "database", where that is what is locked. */
  #tables: string[] | undefined;
  #holding: LockHolding[] | undefined;
  /** Nobody else can hold anything. */
  #whole = false;
  #calls: readonly TakenCall[] = [];
  /** Tables with rows that nobody else can wait for. */
  #added: Set<string> | undefined;
  #saved: Saved[] | undefined;
  #statements = 0;
  #last: SeenStatement | undefined;
  #slowest: { readonly seen: SeenStatement; readonly ms: number } | undefined;
  #hazards: Partial<Record<HazardKind, number>> | undefined;
  #left = false;
  over = false;
  failure: Error | undefined;
  /** A sign of the network that may turn out to be a part of another one. */
  #network: { readonly sign: Sign; readonly site: CallSite } | undefined;

  constructor(watcher: Watcher, site: CallSite | undefined, kind: "transaction" | "joined" | "unsettled") {
    this.#watcher = watcher;
    this.#site = site;
    this.#kind = kind;
    // Not one that is over: a loop of transactions that were opened elsewhere would be a chain without end.
    let outer = sections.getStore();
    while (outer instanceof Watched && outer.over) outer = outer.#outer;
    this.#outer = outer instanceof Watched ? outer : undefined;
  }

  get ends(): boolean {
    return this.#kind !== "unsettled";
  }

  /** Whether what is done now is done under its locks. */
  get holds(): boolean {
    return this.#since !== undefined && !this.#left && !this.over && this.#kind !== "unsettled";
  }

  get tells(): boolean {
    return this.#watcher.tells;
  }

  get wantsPlaces(): boolean {
    return this.#watcher.wantsPlaces;
  }

  /** The one whose locks are held here: this, or one around it. */
  get holder(): Watched | undefined {
    if (this.holds) return this;
    return this.#outer?.holder;
  }

  asks(what: Locked, site: CallSite | undefined): void {
    if (this.#holding || this.#outer) this.#follow(wantedIn(what), site);
  }

  took(what: Locked, site: CallSite | undefined): void {
    if (what.kind === "key" || what.kind === "lease" || what.kind === "call")
      (this.#locked ??= []).push(what);
    else this.#write(withoutSchema(what.name));
    this.#whole ||= what.kind === "database";
    this.#hold(wantedIn(what), site);
  }

  sent(statement: unknown, values?: readonly unknown[], again = false): Answered | undefined {
    if (!again) this.#statements++;
    const seen = seenAs(statement, this.#watcher.redact, this.sent);
    if (!seen) return undefined;
    if (!again) {
      this.#last = seen;
      for (const table of seen.adds) (this.#added ??= new Set()).add(table);
      if (seen.savepoint) this.savepoint(seen.savepoint);
    }
    if (!again || values) {
      for (const each of seen.locks) this.#sentRows(each, seen, values);
      for (const call of seen.calls) this.#sentCall(call, seen, values);
    }
    return this.#since !== undefined && this.#watcher.wantsTimes ? this.#timing(seen) : undefined;
  }

  #sentRows(
    { name, wanted }: SeenStatement["locks"][number],
    { row, waits, site }: SeenStatement,
    values: readonly unknown[] | undefined,
  ): void {
    const id = this.#added?.has(name) ? undefined : row?.id(values ?? []);
    const by = id === undefined && values ? undefined : row?.by;
    const exact = row ? wanted.map((each) => ({ ...each, id, by })) : wanted;
    if (waits && !this.#whole && (id !== undefined || !this.#tables?.includes(name)))
      this.#follow(exact, site);
    this.#write(name);
    this.#hold(exact, site);
  }

  #sentCall(call: LockCall, seen: SeenStatement, values: readonly unknown[] | undefined): void {
    const key = keyOfCall(call, values ?? []);
    if (!key && !values) return;
    const name = key ? this.#watcher.show(key.name) : `${call.called}(…)`;
    const wanted = key ? wantedCall(key, call.shared) : [];
    if (call.lasts === "given back") return this.#letGo(name, wanted);
    if (call.waits) this.#follow(wanted, seen.site);
    this.#calls = [...this.#calls, { name, wanted, session: call.lasts === "session" }];
    this.#hold(wanted, seen.site);
  }

  #letGo(name: string, wanted: readonly Wanted[]): void {
    const at = this.#calls.findLastIndex((each) => each.session && each.name === name);
    if (at < 0) return;
    this.#calls = this.#calls.toSpliced(at, 1);
    // Taken twice, it must be given back twice.
    if (this.#calls.some((each) => each.name === name)) return;
    for (const each of wanted) letGo((this.#holding ??= []), each);
    if (this.#names().length === 0) this.#since = undefined;
  }

  /** What was taken after it is given back with it, but for locks of the session. */
  savepoint({ action, name }: Savepoint): void {
    if (this.#watcher.keeps) return;
    const saved = (this.#saved ??= []);
    if (action === "set")
      saved.push({
        name,
        since: this.#since,
        locked: [...(this.#locked ?? [])],
        tables: [...(this.#tables ?? [])],
        calls: this.#calls,
        holding: (this.#holding ?? []).map((each) => ({ ...each, ids: new Set(each.ids) })),
      });
    const at = saved.findLastIndex((each) => each.name === name);
    const found = saved[at];
    if (!found || action === "set") return;
    saved.splice(at);
    if (action === "release") return;
    const calls = this.#calls.filter((each) => each.session || found.calls.includes(each));
    const isBack = (each: TakenCall) => !calls.includes(each);
    if (calls.every((each) => found.calls.includes(each))) this.#since = found.since;
    this.#locked = [...found.locked];
    this.#tables = [...found.tables];
    this.#holding = [...found.holding];
    for (const { wanted } of found.calls.filter(isBack))
      for (const each of wanted) letGo(this.#holding, each);
    for (const { wanted } of calls) this.#hold(wanted, undefined);
    this.#calls = calls;
    // It is still there, and can be rolled back to again.
    this.savepoint({ action: "set", name });
  }

  #timing(seen: SeenStatement): Answered {
    const since = performance.now();
    return () => {
      const ms = performance.now() - since;
      if (!this.#slowest || ms > this.#slowest.ms) this.#slowest = { seen, ms };
    };
  }

  #write(table: string): void {
    if (!this.#tables?.includes(table)) (this.#tables ??= []).push(table);
  }

  #hold(wanted: readonly Wanted[], site: CallSite | undefined): void {
    this.#since ??= performance.now();
    for (const each of wanted) hold((this.#holding ??= []), each, site);
  }

  /** What is held here, and in transactions around it: by the same caller, who waits. `who`: asks for it. */
  #follow(wanted: readonly Wanted[], site: CallSite | undefined, who: Watched = this): void {
    if (who.#watcher.watching.hazards === "off") return;
    if (this.#holding && !this.over)
      for (const each of wanted) {
        const steps = follow(this.#holding, each, site);
        if (steps) who.#inverted(steps, site);
      }
    if (this.#outer) this.#outer.#follow(wanted, site, who);
  }

  #inverted(steps: readonly OrderStep[], site: CallSite | undefined): void {
    emit("holdfast:order:inverted", () => ({ steps }));
    const shown = steps.map(
      ({ from, to, first, second }) => ` ${to} (${second ?? "?"}) after ${from} (${first ?? "?"})`,
    );
    this.#report("order", site ?? callSites.here(this.#inverted), `${shown.join(";")}.`);
  }

  /** Those of the network come in twos and threes: a request opens a connection, which looks up a name. */
  sign(sign: Sign, site: CallSite): void {
    const rank = network.indexOf(sign);
    if (rank < 0) return this.#report(sign, site);
    const { fetch = 0, http = 0, connection = 0 } = this.#hazards ?? {};
    if (rank > 1 && fetch + http + connection > 0) return;
    const pending = this.#network;
    if (!pending || network.indexOf(pending.sign) > rank) this.#network = { sign, site };
    if (pending) return;
    queueMicrotask(() => {
      const found = this.#network;
      this.#network = undefined;
      if (found) this.#report(found.sign, found.site);
    });
  }

  saw(kind: HazardKind, site: CallSite): void {
    if (kind === "late") {
      if (this.#left) this.#report(kind, site);
      return;
    }
    if (isOurs()) return;
    const { holder } = this;
    if (holder) holder.#report(kind, site);
  }

  #report(kind: HazardKind, site: CallSite, detail?: string): void {
    const { hazards: mode } = this.#watcher.watching;
    if (mode === "off") return;
    const counts = (this.#hazards ??= {});
    counts[kind] = (counts[kind] ?? 0) + 1;
    if (mode === "count" && !heard("holdfast:hazard")) return;
    const [place, transaction] = [site.place, this.#site?.place];
    emit("holdfast:hazard", () => ({ kind, locks: this.#names(), place, transaction }));
    // That is said by whoever found it.
    if (mode === "count" || kind === "connection") return;
    const error = new HazardError(kind, this.#names(), place, transaction, detail);
    if (mode === "throw" && this.#kind === "transaction" && kind !== "late") {
      this.failure ??= error;
      return;
    }
    const once = `${kind} ${place}`;
    if (told.has(once) || told.size >= mostTold) return;
    told.add(once);
    globalThis.process?.emitWarning?.(error.message, { type: error.name, code: error.code });
  }

  #locks(): string[] {
    const locked = this.#locked ?? [];
    const keys = locked.flatMap((each) => (each.kind === "key" ? each.keys : []));
    const others = locked.flatMap((each) => (each.kind === "key" ? [] : each.name));
    const calls = this.#calls.map(({ name }) => name);
    return [...keyNames(keys, this.#watcher.show), ...new Set([...others, ...calls])];
  }

  #names(): string[] {
    return [...this.#locks(), ...(this.#tables ?? [])];
  }

  left(): void {
    this.#left = true;
  }

  end(): void {
    if (this.over) return;
    this.over = true;
    const kind = this.#kind;
    if (this.#since === undefined || kind === "unsettled") return;
    const heldMs = performance.now() - this.#since;
    const statements = this.#statements;
    const what = () => ({ kind, locks: this.#locks(), tables: this.#tables ?? [], heldMs, statements });
    emit("holdfast:section:end", what);
    const { slow } = this.#watcher.watching;
    if (!slow || heldMs < slow.suspectMs) return;
    emit("holdfast:section:slow", () => ({
      ...what(),
      level: heldMs < slow.brokenMs ? "suspect" : "broken",
      place: this.#site?.place,
      statement: this.#last && shownStatement(this.#last.plain),
      slowest: this.#slowest && {
        statement: shownStatement(this.#slowest.seen.plain),
        durationMs: this.#slowest.ms,
      },
      hazards: { ...this.#hazards },
    }));
  }
}

/** What has a name that tells more comes first. */
const network: readonly Sign[] = ["fetch", "http", "socket", "dns"];

function wantedIn(what: Locked): readonly Wanted[] {
  if (what.kind === "key") return wantedKeys(what.keys);
  if (what.kind !== "rows" && what.kind !== "table") return [];
  return wantedRows(withoutSchema(what.name), what.shared === true);
}

/** As most statements name it. */
function withoutSchema(name: string): string {
  return name.slice(name.lastIndexOf(".") + 1).toLowerCase();
}

/** Once for the process, however many instances watch. */
function shared(begin: () => () => void): () => () => void {
  let users = 0;
  let end: (() => void) | undefined;
  return () => {
    if (users++ === 0) end = begin();
    return () => {
      if (--users === 0) end?.();
    };
  };
}

const listener: Listener = {
  matters: holderHere,
  told: (about, sign, site) => (about as Watched).sign(sign, site),
  lasts: (about) => (about as Watched).holds,
};

const heardSigns = shared(() => hearSigns(listener));
const replacedFunctions = shared(() =>
  replaceFunctions({
    ...listener,
    // Of an instance that only counts, the same is seen whoever else watches.
    matters() {
      const holder = holderHere();
      return holder?.tells ? holder : undefined;
    },
  }),
);

/** Whose locks are held by the code that calls. */
function holderHere(): Watched | undefined {
  const section = sectionHere();
  return section instanceof Watched && !isOurs() ? section.holder : undefined;
}
