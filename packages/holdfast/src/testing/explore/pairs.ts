/** Which statements of two actors were tried in the middle of each other's work, and which never were. */
import { basename } from "node:path";
import type { ActorStep } from "./actor.ts";
import type { ExploreRun } from "./schedule.ts";
import { footprint } from "./statement.ts";

/** A statement, and where your code sends it. */
export interface PairedStatement {
  readonly actor: string;
  readonly statement: string;
  /** `file:line:column`, if the stack shows it. */
  readonly place?: string;
}

/**
 * Two statements of different actors that touch the same table, of which one writes, and that no run has interleaved: neither was
 * sent while the other's actor was in the middle of its work on that table.
 */
export interface UnexploredPair {
  /** Absent: one of them calls a function, which may touch any table or take a lock. */
  readonly table?: string;
  readonly statements: readonly [PairedStatement, PairedStatement];
}

interface Sent {
  readonly actor: number;
  readonly text: string;
  readonly kind: "end" | "work";
  /** A transaction is open, which ends later. */
  readonly inside: boolean;
  readonly waitedFor: ReadonlySet<number>;
  /** The same for each statement with the same text from the same place. Only work has one. */
  readonly id: number;
}

/** Two that came in the same run. */
interface Pair {
  tried: boolean;
  /** Nothing can come between, since neither actor has anything else to do with the table: both orders are all there is. */
  lone: boolean;
  readonly orders: Set<boolean>;
}

export class StatementPairs {
  readonly #names: readonly string[];
  readonly #ids = new Map<string, number>();
  readonly #statements: (PairedStatement & { readonly sent: Sent })[] = [];
  readonly #pairs = new Map<string, Pair>();

  constructor(names: readonly string[]) {
    this.#names = names;
  }

  add({ choices }: ExploreRun): void {
    const sent = choices.flatMap(({ step }) => this.#sent(step));
    for (const [j, b] of sent.entries())
      for (const [i, a] of sent.slice(0, j).entries()) {
        const pair = this.#pairOf(a, b);
        if (!pair || pair.tried) continue;
        const before = workOn(b, a.actor, sent);
        const after = workOn(a, b.actor, sent);
        const isOpen = a.inside && endOf(sent, i) > j;
        const goesOn = isOpen || before.some((at) => at > j);
        const inTheMiddle =
          (goesOn && before.findLast((at) => at < j) === i) ||
          (after.some((at) => at < i) && after.find((at) => at > i) === j);
        pair.tried = inTheMiddle || keptApart(sent, i, j);
        pair.lone &&= before.length === 1 && after.length === 1 && !a.inside && !b.inside;
        pair.orders.add(a.id < b.id);
      }
  }

  /** Of all the statements that were seen, also of those that never came in the same run. */
  get unexplored(): UnexploredPair[] {
    return this.#statements.flatMap(({ sent: a, ...one }, i) =>
      this.#statements.slice(i + 1).flatMap(({ sent: b, ...other }) => {
        const table = shared(a, b);
        const { tried = false, lone = false, orders } = this.#pairs.get(keyOf(a, b)) ?? {};
        if (table === undefined || tried || (lone && orders?.size === 2)) return [];
        return [{ ...(table !== "" && { table }), statements: [one, other] as const }];
      }),
    );
  }

  #sent(step: ActorStep): Sent[] {
    const { actor, text, waitedFor, inside, opens } = step;
    const { kind, any, reads, writes } = footprint(text);
    const one = { actor, text, waitedFor, inside: inside || opens, id: -1 };
    if (kind === "commit" || kind === "rollback") return [{ ...one, kind: "end" }];
    if (kind === "begin" || kind === "setting") return [];
    return any || reads.size + writes.size > 0 ? [this.#known(step, { ...one, kind: "work" })] : [];
  }

  #known({ label, place }: ActorStep, sent: Sent): Sent {
    const key = `${sent.actor}|${place}|${label}`;
    const id = this.#ids.get(key) ?? this.#statements.length;
    if (id === this.#statements.length) {
      this.#ids.set(key, id);
      const statement = sent.text.replaceAll(/\s+/g, " ").trim();
      const actor = this.#names[sent.actor] ?? "";
      this.#statements.push({
        actor,
        statement,
        ...(place !== undefined && { place }),
        sent: { ...sent, id },
      });
    }
    return { ...sent, id };
  }

  #pairOf(a: Sent, b: Sent): Pair | undefined {
    if (shared(a, b) === undefined) return undefined;
    const key = keyOf(a, b);
    const pair = this.#pairs.get(key) ?? { tried: false, lone: true, orders: new Set<boolean>() };
    this.#pairs.set(key, pair);
    return pair;
  }
}

const keyOf = (a: Sent, b: Sent) => [a.id, b.id].toSorted((one, other) => one - other).join();

/** The table that both touch, of which one writes it; "": it may be any. */
function shared(a: Sent, b: Sent): string | undefined {
  if (a.actor === b.actor || a.kind !== "work" || b.kind !== "work") return undefined;
  const [one, other] = [footprint(a.text), footprint(b.text)];
  const both = [...one.writes].find((table) => other.writes.has(table) || other.reads.has(table));
  const table = both ?? [...other.writes].find((each) => one.reads.has(each));
  return table ?? (one.any || other.any ? "" : undefined);
}

/** Where an actor sends what touches the same table as this one. */
const workOn = (other: Sent, actor: number, sent: readonly Sent[]): number[] =>
  sent.flatMap((each, at) => (each.actor === actor && shared(each, other) !== undefined ? [at] : []));

/** Where the transaction of this one ends. */
const endOf = (sent: readonly Sent[], at: number): number =>
  sent.findIndex(({ actor, kind }, i) => i > at && actor === sent[at]?.actor && kind === "end");

/** The later one's actor was let go right after the earlier one, or while it was at it, and a lock has held it back. */
function keptApart(sent: readonly Sent[], i: number, j: number): boolean {
  const [first, second] = [sent[i]?.actor, sent[j]?.actor];
  return sent.some(({ actor, waitedFor }, at) => {
    if (at > j || actor !== second || !waitedFor.has(first ?? -1)) return false;
    const last = sent.findLastIndex((each, k) => k < at && each.actor === first && each.kind === "work");
    const next = sent.findIndex((each, k) => k > at && each.actor === second);
    return i >= last && (next < 0 || i < next);
  });
}

/** In a line, with an example. */
export function pairsText(pairs: readonly UnexploredPair[]): string {
  const [first] = pairs;
  if (!first) return "";
  const count = pairs.length === 1 ? "1 pair of statements was" : `${pairs.length} pairs of statements were`;
  const on = first.table === undefined ? "" : ` on ${first.table}`;
  return `${count} never interleaved, e.g. ${first.statements.map(statementText).join(" and ")}${on}`;
}

function statementText({ actor, statement, place }: PairedStatement): string {
  if (place === undefined)
    return `${actor}'s "${statement.length > 50 ? `${statement.slice(0, 49)}…` : statement}"`;
  return `${actor}'s ${statement.split(" ", 1)[0]} (${basename(place).replace(/:\d+$/, "")})`;
}
