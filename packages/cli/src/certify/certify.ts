/** Runs the probes one after the other, on a table of their own, which is gone afterwards. */
import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { type Capabilities, HoldfastError, ReplicaError, failureOf } from "holdfast";
import { describe } from "../describe.ts";
import { NoAnswer, within } from "../within.ts";
import { Failure } from "../failure.ts";
import type { Kind, Server } from "../server.ts";
import { unless } from "../unless.ts";
import { Caller, answerMs } from "./caller.ts";
import { type Kit, longMs } from "./kit.ts";
import { mysqlKit } from "./mysql.ts";
import { postgresKit } from "./postgres.ts";
import { type Node, type NodeFacts, acrossNodes, isGone } from "./nodes.ts";
import { type Ground, type Line, type Probe, type Seen, type Verdict, lineOf, unknown } from "./probe.ts";
import { gap, isClaimed, probes } from "./probes.ts";
import { sqliteKit } from "./sqlite.ts";
import { isDenied } from "../user.ts";

export interface CertifyOptions {
  readonly only?: readonly string[] | undefined;
  /** Nothing is made and written: probes that need a table are left out. */
  readonly readOnly?: boolean | undefined;
  /** Further nodes of the same cluster. */
  readonly nodes?: readonly Server[] | undefined;
  readonly signal: AbortSignal;
  /** Told what is made, before it is. */
  readonly say: (note: string) => void;
  /** Told before each probe. */
  readonly progress?: (id: string, done: number, all: number) => void;
}

export interface Certificate {
  readonly server: string;
  readonly kind: Kind;
  readonly version: string;
  /** What Holdfast believes; undefined: it refuses the server. */
  readonly capabilities: Capabilities | undefined;
  /** Why. */
  readonly refused: string | undefined;
  readonly lines: readonly Line[];
  /** The further ones that were named. */
  readonly nodes: readonly NodeFacts[];
  /** The kind of cluster that the server is one node of, if no other node was named. */
  readonly alone: string | undefined;
}

/** Of a whole probe: each step of it has a limit of its own. */
const probeMs = 60_000;

export async function certify(server: Server, options: CertifyOptions): Promise<Certificate> {
  const { signal, say } = options;
  const chosen = probes.filter(({ id }) => options.only === undefined || options.only.includes(id));
  const version = await versionOf(server);
  const { capabilities, refused } = await unless(signal, believed(server));
  const name = `holdfast_certify_${randomBytes(6).toString("hex")}`;
  const byRows = capabilities?.transactionLocks === "lock row";
  const writes = !options.readOnly && chosen.some((probe) => !probe.readsOnly);
  await using site = new Site(server, say);
  const kits = kitsOf(server.kind, name, byRows);
  const [made, readOnly] = writes ? await onGround(site, kits, refused, options) : [kits[0], true];
  const lines: Line[] = [];
  let numbers = 0;
  let keys = 0;
  const run = async (probe: Probe, servers: readonly Server[], atCommit: boolean): Promise<Seen> => {
    await using callers = new Callers(servers, made);
    const ground: Ground = {
      server,
      kit: made,
      atCommit,
      next: () => ++numbers,
      key: () => ++keys,
      verdictOf: (id) => lines.find((line) => line.id === id)?.verdict,
      caller: () => callers.open(),
    };
    return await unless(signal, tried(probe, ground, readOnly));
  };
  for (const probe of chosen) {
    options.progress?.(probe.id, lines.length, chosen.length);
    const seen = await run(probe, [server], false);
    lines.push(lineOf(probe, verdictOf(seen, probe, capabilities), seen.what));
  }
  const others = options.nodes ?? [];
  const nodes: NodeFacts[] = [];
  for (const [i, other] of others.entries()) {
    const node: Node = {
      server: other,
      number: i + 2,
      version: await versionOf(other),
      ...(await unless(signal, believed(other))),
    };
    site.arriveOn(other);
    if (!readOnly) say(`Waits for it to arrive on ${other.shown}, ${longMs / 1000} s at most.`);
    const found = await acrossNodes({
      first: { server, number: 1, version, capabilities, refused },
      node,
      kit: made,
      chosen,
      readOnly,
      run,
      verdictOf,
      next: () => ++numbers,
      signal,
      progress: (id, done, all) => options.progress?.(`${id} on node ${node.number}`, done, all),
    });
    lines.push(...found.lines);
    nodes.push(found.facts);
  }
  const alone = others.length === 0 ? await made.cluster?.(server).catch(() => undefined) : undefined;
  return { server: server.shown, kind: server.kind, version, capabilities, refused, lines, nodes, alone };
}

/** What the probes need, and whether they must do without: a server that is refused anyway, such as a replica, may refuse too. */
async function onGround(
  site: Site,
  kits: readonly [Kit, ...Kit[]],
  refused: string | undefined,
  { signal, say }: CertifyOptions,
): Promise<[kit: Kit, readOnly: boolean]> {
  try {
    return [await site.make(kits, signal), false];
  } catch (error) {
    if (refused === undefined || !(error instanceof Failure)) throw error;
    say(error.message);
    return [kits[0], true];
  }
}

/** The sessions of one probe, which end with it. */
class Callers implements AsyncDisposable {
  readonly #servers: readonly Server[];
  readonly #kit: Kit;
  readonly #all: Caller[] = [];
  #opened = 0;
  #over = false;

  constructor(servers: readonly Server[], kit: Kit) {
    this.#servers = servers;
    this.#kit = kit;
  }

  /** On each of the servers in turn. */
  async open(): Promise<Caller> {
    const server = this.#servers[this.#opened++ % this.#servers.length] as Server;
    const caller = new Caller(await within(answerMs, server.session()));
    this.#all.push(caller);
    if (this.#over) {
      caller.destroy();
      throw new NoAnswer("it was stopped");
    }
    if (this.#kit.opening !== undefined) await caller.query(this.#kit.opening);
    return caller;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#over = true;
    await Promise.all(this.#all.map((caller) => caller[Symbol.asyncDispose]()));
  }
}

async function tried(probe: Probe, ground: Ground, readOnly: boolean): Promise<Seen> {
  const missing = gap(probe, ground.kit);
  if (missing) return missing;
  if (readOnly && !probe.readsOnly) return unknown("not tried: it needs a table");
  try {
    return await within(probeMs, probe.run(ground));
  } catch (error) {
    const kind = failureOf(error)?.kind;
    if (error instanceof NoAnswer || kind === "lost") return unknown(describe(error));
    // What the server says no to by itself is not there; what it says of rights is not known.
    return isDenied(error)
      ? unknown(`this user may not: ${describe(error)}`)
      : { verdict: "no", what: `the server refused: ${describe(error)}` };
  }
}

function verdictOf({ verdict }: Seen, probe: Probe, capabilities: Capabilities | undefined): Verdict {
  if (verdict === "yes") return "holds";
  if (verdict !== "no") return verdict;
  return probe.carries.includes(indispensable) || isClaimed(probe, capabilities) ? "fails" : "absent";
}

/** Where not even these are to be had there is no use in Holdfast, whether or not it knows. */
const indispensable = "transactionLocks";

async function believed(
  server: Server,
): Promise<{ capabilities?: Capabilities; refused?: string; replica?: boolean }> {
  try {
    const capabilities = await within(answerMs * 2, server.hf.capabilities());
    const { primary } = capabilities;
    return { capabilities, ...(primary !== true && { refused: `it takes writes, but ${primary.why}` }) };
  } catch (error) {
    // What it does not take, it says why. That is a finding; whatever else went wrong is not.
    if (error instanceof HoldfastError)
      return { refused: error.message, replica: error instanceof ReplicaError };
    // Something that answers its first question with an error is none of those that it knows.
    if (error instanceof NoAnswer || failureOf(error)?.kind === "lost")
      throw new Failure(`${server.shown}: ${describe(error)}.`, { cause: error });
    return { refused: `it could not be asked what it is: ${describe(error)}` };
  }
}

async function versionOf(server: Server): Promise<string> {
  const functions = { sqlite: "sqlite_version()", postgres: "pg_catalog.version()" } as Record<Kind, string>;
  const text = `SELECT ${functions[server.kind] ?? "version()"} AS version`;
  // Not in a transaction: what stands between may have none.
  const [row] = await within(answerMs, server.run(text));
  return String(row?.["version"]);
}

/** Several, where a user may have the rights for one of them. */
function kitsOf(kind: Kind, name: string, byRows: boolean): [Kit, ...Kit[]] {
  if (kind === "postgres") return [postgresKit(name, byRows), postgresKit(name, byRows, true)];
  return [kind === "sqlite" ? sqliteKit(name) : mysqlKit(name)];
}

/** What is made on somebody's server, and goes again, whatever happens. */
class Site implements AsyncDisposable {
  readonly #server: Server;
  readonly #say: (note: string) => void;
  #kit: Kit | undefined;
  readonly #nodes: Server[] = [];
  /** The second Ctrl-C ends the process at once. */
  readonly #onExit = (): void => this.#left("it was stopped before that");

  constructor(server: Server, say: (note: string) => void) {
    this.#server = server;
    this.#say = say;
  }

  async make(kits: readonly [Kit, ...Kit[]], signal: AbortSignal): Promise<Kit> {
    for (const [i, kit] of kits.entries()) {
      this.#say(`Makes ${kit.made} on ${this.#server.shown}, and removes it afterwards.`);
      this.#kit = kit;
      process.once("exit", this.#onExit);
      let made = 0;
      try {
        for (const statement of kit.make) {
          signal.throwIfAborted();
          await within(answerMs, this.#server.run(statement));
          made++;
        }
        return kit;
      } catch (error) {
        if (signal.aborted || error instanceof NoAnswer) throw error;
        // A replica would refuse to remove what it has refused to make.
        if (made === 0 && failureOf(error)?.kind === "read-only") this.#forget();
        else await this[Symbol.asyncDispose]();
        if (i === kits.length - 1 || !refusesTables(error))
          throw new Failure(
            `${this.#server.shown}: ${kit.made} could not be made: ${describe(error)}. It needs the right to make a table; --read-only tries what needs none.`,
            { cause: error },
          );
      }
    }
    throw new Failure("There is nothing to be made.");
  }

  /** What is made is removed there by replication. */
  arriveOn(node: Server): void {
    this.#nodes.push(node);
  }

  #left(why: string): void {
    this.#say(
      `Could not remove ${this.#kit?.made} from ${this.#server.shown}: ${why}. By hand: ${this.#kit?.remove.join("; ")}`,
    );
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const kit = this.#kit;
    if (!kit) return;
    for (const since = performance.now(); ;) {
      try {
        // One session for all of it: what it sets is its own.
        await using session = await within(answerMs, this.#server.session());
        for (const statement of kit.remove) await within(answerMs, session.query(statement));
        break;
      } catch (error) {
        // A session that was ended may have it for another moment.
        if (performance.now() - since < 2 * longMs) await sleep(250);
        else {
          this.#left(describe(error));
          break;
        }
      }
    }
    for (const node of this.#nodes)
      if (!(await isGone(kit, node)))
        this.#say(
          `${kit.made} is still on ${node.shown}: it goes from there when replication has caught up. By hand: ${kit.remove.join("; ")}`,
        );
    this.#forget();
  }

  #forget(): void {
    process.off("exit", this.#onExit);
    this.#kit = undefined;
  }
}

/** Not in this schema; no schema to make it in. */
function refusesTables(error: unknown): boolean {
  const { code } = error as { readonly code?: unknown };
  return code === "42501" || code === "3F000";
}
