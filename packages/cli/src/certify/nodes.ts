/**
 * The same between nodes. What one node says of itself is no word of the others: its locks may be its own, and what it has committed
 * may reach them later. So A is put on one node and B on another.
 *
 * Nothing is committed on a further node before it has been seen to share its locks with the first one, or to be one of a cluster that
 * compares at COMMIT: a write on a replica could stop its replication.
 */
import { setTimeout as sleep } from "node:timers/promises";
import { type Capabilities, failureOf } from "holdfast";
import { describe } from "../describe.ts";
import type { Server } from "../server.ts";
import { unless } from "../unless.ts";
import { NoAnswer, within } from "../within.ts";
import { Caller, answerMs } from "./caller.ts";
import { type Kit, longMs } from "./kit.ts";
import { type Line, type Probe, type Seen, type Verdict, lineOf, no, unknown, yes } from "./probe.ts";
import { isClaimed, probes } from "./probes.ts";

export interface Node {
  readonly server: Server;
  /** 1: the one that was named first. */
  readonly number: number;
  readonly version: string;
  readonly capabilities?: Capabilities | undefined;
  readonly refused?: string | undefined;
  /** It is refused since it takes no writes. */
  readonly replica?: boolean;
}

/** What is told of a further node. */
export interface NodeFacts {
  readonly node: number;
  readonly server: string;
  readonly version: string;
  /** What it turned out to be, in a sentence. */
  readonly what: string;
  /** Why Holdfast refuses it, unless it is a replica, which is no failure. */
  readonly refused?: string;
}

interface Across {
  readonly first: Node;
  readonly node: Node;
  readonly kit: Kit;
  readonly chosen: readonly Probe[];
  readonly readOnly: boolean;
  readonly run: (probe: Probe, servers: readonly Server[], atCommit: boolean) => Promise<Seen>;
  readonly verdictOf: (seen: Seen, probe: Probe, capabilities: Capabilities | undefined) => Verdict;
  readonly next: () => number;
  readonly signal: AbortSignal;
  readonly progress: (id: string, done: number, all: number) => void;
}

/** The row that shows whether a node has caught up. */
const markRow = 16;

const arrives: Omit<Probe, "run"> = {
  id: "arrives",
  title: "What is committed on the first node arrives on this one",
  tried: `a row is changed on node 1, and read here until it has changed, ${longMs / 1000} s at most`,
  carries: [],
  features: "everything: they are one database",
  advice:
    "Name nodes of one cluster, each with the same database in its URL and a user who sees the same tables. Name the one that takes the writes first.",
};

const oneNode =
  "Two callers can both be let in, one on each node. Let the application connect to one node for all that it locks, checks and writes, and make the others read-only.";

const named = (id: string): Probe => probes.find((probe) => probe.id === id) as Probe;
/** They decide whether anything is committed on both. The second does so, to a row, at worst with two values. */
const gates = { held: named("lock-excludes"), atCommit: named("compare-and-set") };

export async function acrossNodes(across: Across): Promise<{ lines: Line[]; facts: NodeFacts }> {
  const { first, node, chosen, readOnly, signal } = across;
  const tried = chosen.filter((probe) => probe.across !== undefined);
  const lines: Line[] = [];
  const add = (probe: Omit<Probe, "run">, verdict: Verdict, seen: string, how?: string): void => {
    const line = lineOf({ ...probe, advice: probe === arrives ? arrives.advice : oneNode }, verdict, seen);
    lines.push({ ...line, node: node.number, ...(how !== undefined && { tried: `${line.tried}. ${how}` }) });
  };
  const factsOf = (what: string): NodeFacts => ({
    node: node.number,
    server: node.server.shown,
    version: node.version,
    what,
    ...(node.refused !== undefined && !node.replica && { refused: node.refused }),
  });
  if (!first.capabilities) {
    add(arrives, "unknown", "not tried: Holdfast refuses node 1. Name a node that takes the writes first");
    return { lines, facts: factsOf("not tried, since Holdfast refuses node 1") };
  }
  const arrived = readOnly
    ? unknown("not tried: it needs a table")
    : await unless(signal, caughtUp(across, first, node));
  add(
    arrives,
    { yes: "holds", no: "fails", unknown: "unknown", absent: "absent" }[arrived.verdict] as Verdict,
    arrived.what,
  );
  if (arrived.verdict === "no") return { lines, facts: factsOf(arrived.what) };
  if (node.replica) {
    for (const probe of tried) {
      if (probe === gates.held)
        add(
          probe,
          "absent",
          "not tried: this node is a read-only replica, and Holdfast refuses to lock there",
        );
      if (probe.id !== "committed" || readOnly) continue;
      const seen = await across.run(probe, [node.server, first.server], false);
      const late = seen.verdict === "yes" ? "each read was the newest this time" : seen.what;
      add(
        probe,
        "absent",
        `${late}: nothing promises that a read on a replica is fresh`,
        "A on this node, which is a replica, B on node 1",
      );
    }
    return {
      lines,
      facts: factsOf("a read-only replica: Holdfast refuses to lock there, and a read there can be late"),
    };
  }
  if (!node.capabilities) return { lines, facts: factsOf("Holdfast refuses this node") };
  const atCommit = [first, node].every(({ capabilities }) => capabilities?.exclusion === "at commit");
  const gate = atCommit ? gates.atCommit : gates.held;
  const gives = isClaimed(gate, node.capabilities);
  const together =
    readOnly || !gives
      ? unknown("Holdfast gives no locks there")
      : await across.run(gate, [first.server, node.server], atCommit);
  const mode: Mode = { atCommit, writes: readOnly || together.verdict === "yes" };
  for (const [done, probe] of tried.entries()) {
    across.progress(probe.id, done, tried.length);
    const { seen, how } = await between(across, probe, mode);
    const claimed = [first, node].every(({ capabilities }) => isClaimed(probe, capabilities));
    // Reads and locks of such a cluster are of one node, whatever was seen this time.
    const known = (atCommit && probe.across === "held") || (seen.verdict === "no" && !claimed);
    add(probe, known ? "absent" : across.verdictOf(seen, probe, first.capabilities), seen.what, how);
  }
  return { lines, facts: factsOf(whatOf(together, atCommit, readOnly)) };
}

function whatOf(together: Seen, atCommit: boolean, readOnly: boolean): string {
  if (readOnly) return "tried without a table, so that it is not known whether it is the same database";
  if (together.verdict === "unknown")
    return `it is not known whether it keeps out callers on node 1: ${together.what}`;
  if (together.verdict === "no")
    return "it takes writes, and does not keep out callers on node 1: nothing keeps the two nodes apart";
  return atCommit
    ? "a node of the same cluster: writes that conflict are undone at COMMIT, and a read can be late"
    : "it shares its locks with node 1";
}

interface Mode {
  readonly atCommit: boolean;
  /** Something may be committed on both nodes. */
  readonly writes: boolean;
}

const way = (a: Node, b: Node): string => `A on node ${a.number}, B on node ${b.number}`;

async function between(
  across: Across,
  probe: Probe,
  { atCommit, writes }: Mode,
): Promise<{ seen: Seen; how?: string }> {
  const { first, node, run } = across;
  const tryWay = async (a: Node, b: Node): Promise<Seen> => {
    const seen = await run(probe, [a.server, b.server], atCommit);
    if (atCommit && writes && !across.readOnly) {
      // What comes next must not meet what is still on its way.
      await unless(across.signal, caughtUp(across, first, node));
      await unless(across.signal, caughtUp(across, node, first));
    }
    return seen.verdict === "yes" || seen.verdict === "absent"
      ? seen
      : { ...seen, what: `${way(a, b)}: ${seen.what}` };
  };
  // Such as locks of sessions, where one of them is behind a pooler.
  if (isClaimed(probe, first.capabilities) && !isClaimed(probe, node.capabilities))
    return { seen: no("not tried, since Holdfast refuses it on this node") };
  if (!writes && !probe.readsOnly) {
    if (probe.writer === undefined)
      return {
        seen: unknown(
          "not tried: the nodes were not seen to keep each other out, and writes on both could stop their replication",
        ),
      };
    const [a, b] = probe.writer === "A" ? [first, node] : [node, first];
    const seen = await tryWay(a, b);
    const lucky = seen.verdict === "yes" && unknown(`${seen.what}, this time: nothing here makes it so`);
    return { seen: lucky || seen, how: way(a, b) };
  }
  const seen = await tryWay(first, node);
  return {
    seen: seen.verdict === "yes" ? await tryWay(node, first) : seen,
    how: `${way(first, node)}; then the other way round`,
  };
}

/** Whether what is committed on one node is there on another, in time. */
async function caughtUp({ kit, next }: Across, from: Node, to: Node): Promise<Seen> {
  try {
    await using writer = new Caller(await within(answerMs, from.server.session()));
    await using reader = new Caller(await within(answerMs, to.server.session()));
    const n = next();
    const since = performance.now();
    const late = (): boolean => performance.now() - since > longMs;
    while ((await kit.write(writer, markRow, n)) !== "done" && !late()) await sleep(20);
    let there = false;
    for (; !late(); await sleep(20)) {
      const found = await readOf(kit, reader);
      if (found === n) return yes(`it did`);
      there = found !== undefined;
    }
    return no(
      there
        ? `what node ${from.number} had committed was not there after ${longMs / 1000} s: replication is late, or has stopped`
        : `this is another database, or replication from node ${from.number} does not reach it: the table was not there after ${longMs / 1000} s`,
    );
  } catch (error) {
    return unknown(describe(error));
  }
}

/** Undefined: there is no table. */
async function readOf(kit: Kit, caller: Caller): Promise<number | undefined> {
  try {
    return await kit.read(caller, markRow);
  } catch (error) {
    if (failureOf(error)?.kind !== "schema-missing") throw error;
    return undefined;
  }
}

/** Whether the table is not there any more, or soon will not be. */
export async function isGone(kit: Kit, { session }: Server): Promise<boolean> {
  try {
    await using caller = new Caller(await within(answerMs, session()));
    for (const since = performance.now(); (await readOf(kit, caller)) !== undefined; await sleep(50))
      if (performance.now() - since > longMs) return false;
    return true;
  } catch (error) {
    // It has not said that it is there.
    return !(error instanceof NoAnswer);
  }
}
