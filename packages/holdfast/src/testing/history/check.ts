/** Whether a history can be explained by one operation after the other. */
import type { ModelDecided, Model, Refutation } from "./model.ts";
import { type History, type Operation, textOf } from "./operation.ts";
import { type Clock, type HistoryFound, OutOfTime, type Position, HistorySearch, clock } from "./search.ts";
import { draw, either, shown } from "./show.ts";

export interface CheckOptions {
  /** Milliseconds for all keys together; after that the verdict is "unknown". Default 30,000. */
  readonly maxMs?: number;
}

export interface Counterexample {
  readonly key: string;
  /** The few operations that show it, in the order of their calls. */
  readonly operations: readonly Operation[];
  /** How many had come back before these, and are not shown. */
  readonly earlier: number;
  /** How many others there are that make no difference, and are not shown. */
  readonly others: number;
  /** What the state was, or may have been, before these. */
  readonly from: readonly string[];
  /** The one that has no place. */
  readonly culprit: Operation;
  /** What the state could be while it ran. */
  readonly possible: readonly string[];
  /** For people. */
  readonly text: string;
}

export interface HistoryReport {
  readonly verdict: "ok" | "violation" | "unknown";
  readonly keys: number;
  readonly operations: number;
  /** Those of which nobody knows whether they took effect. */
  readonly unknown: number;
  readonly counterexample?: Counterexample;
  /** Keys for which there was not enough time. */
  readonly undecided: readonly string[];
  /** For people. */
  readonly text: string;
}

/** Each key by itself: a history is linearizable if that of each key is. */
export function checkHistory<State, Input, Output>(
  history: History,
  model: Model<State, Input, Output>,
  { maxMs = 30_000 }: CheckOptions = {},
): HistoryReport {
  const byKey = Map.groupBy(history, ({ key }) => key);
  const time = clock(maxMs);
  const undecided: string[] = [];
  const counted = {
    keys: byKey.size,
    operations: history.length,
    unknown: history.filter(({ outcome }) => outcome === "unknown").length,
    undecided,
  };
  const seen = `${plural(counted.operations, "operation")} on ${plural(counted.keys, "key")}, ${counted.unknown} with unknown outcome`;
  // Inputs and outputs are what the model expects, or its `step` says otherwise.
  const plain = model as Model<State>;
  for (const [key, operations] of byKey) {
    const decided = decide(plain, operations, time);
    if (decided === "unknown") undecided.push(key);
    if (decided === "ok" || decided === "unknown") continue;
    if (decided !== undefined) {
      const counterexample = explainPart(plain, key, decided, operations.length);
      return { verdict: "violation", ...counted, counterexample, text: `✗ ${seen}\n${counterexample.text}` };
    }
    const search = new HistorySearch(plain, key, operations);
    const found = search.run(time);
    if (found.verdict === "unknown") undecided.push(key);
    if (found.verdict !== "violation") continue;
    const counterexample = explain(plain, key, search, found);
    return { verdict: "violation", ...counted, counterexample, text: `✗ ${seen}\n${counterexample.text}` };
  }
  if (undecided.length === 0)
    return { verdict: "ok", ...counted, text: `✓ ${seen}: linearizable as a ${model.name}` };
  const text = `? ${seen}: not decided within ${maxMs} ms for ${either(undecided)}. Give \`maxMs\` more, or use more keys with fewer operations at the same time.`;
  return { verdict: "unknown", ...counted, text };
}

function decide<S>(
  model: Model<S>,
  operations: readonly Operation[],
  time: Clock,
): ModelDecided | "unknown" | undefined {
  try {
    return model.decide?.(operations, time);
  } catch (error) {
    if (error instanceof OutOfTime) return "unknown";
    throw error;
  }
}

/** Throws, with the counter-example drawn, if the history cannot be explained, or if there was not enough time to tell. */
export function expectLinearizable<State, Input, Output>(
  history: History,
  model: Model<State, Input, Output>,
  options?: CheckOptions,
): HistoryReport {
  const report = checkHistory(history, model, options);
  if (report.verdict !== "ok") throw new Error(report.text);
  return report;
}

type Violation<S> = Extract<HistoryFound<S>, { verdict: "violation" }>;

/** A shorter story takes longer to find: with so much time for it, it is short enough. */
const shrinkMs = 5000;
const partMs = 1000;

/**
 * Nothing is left out that could explain what is shown. The story ends with the return that cannot be explained, and
 * begins where all that can have happened before comes down to a state. In between only reads are left out, which change
 * nothing, and what could not be placed anywhere.
 */
function explain<S>(
  model: Model<S>,
  key: string,
  search: HistorySearch<S>,
  violation: Violation<S>,
  { others = 0, later = [] }: { readonly others?: number; readonly later?: readonly Operation[] } = {},
): Counterexample {
  const start = beginning(search, violation);
  const skip = new Set<number>();
  let last = violation;
  const time = clock(shrinkMs);
  const without = (indexes: readonly number[]): boolean => {
    const again = attempt(search, start, new Set([...skip, ...indexes]), time);
    if (again?.event !== violation.event) return false;
    for (const index of indexes) skip.add(index);
    last = again;
    return true;
  };
  without([]);
  const reads = inWindow(search, start.event, violation)
    .filter(({ effect, group }) => effect === "read" && !group)
    .map(({ index }) => index)
    .filter((index) => index !== violation.culprit.index);
  if (reads.length > 0 && !without(reads)) for (const index of reads) without([index]);

  const { operation: culprit } = violation.culprit;
  const operations = inWindow(search, start.event, violation)
    .filter(({ index }) => !skip.has(index))
    .filter(({ index, operation, group }) => {
      const optional = group !== undefined || operation.end > culprit.end;
      return !optional || last.placed.has(index);
    })
    .map(({ operation }) => operation)
    .concat(later);
  const show = (state: S) => model.show?.(state) ?? model.key?.(state) ?? textOf(state);
  const from = unique(start.ways.map(({ state }) => show(state.value)));
  const possible = unique(last.states.map(show));
  const earlier = search.events.slice(0, start.event).filter(({ kind }) => kind === "return").length;
  const story = { key, operations, earlier, others, from, culprit, possible };
  return { ...story, text: tell(story) };
}

/** A part that has no explanation by itself: shown like any other, if it is small enough to be gone through. */
function explainPart<S>(
  model: Model<S>,
  key: string,
  { operations, culprit }: Refutation,
  all: number,
): Counterexample {
  const search = new HistorySearch(model, key, operations);
  const found = search.run(clock(partMs));
  const others = all - operations.length;
  if (found.verdict === "violation") {
    // What came later is part of it, too: who took an item tells who did not.
    const later = operations.filter(({ start }) => start > found.culprit.operation.end);
    return explain(model, key, search, found, { others, later });
  }
  const shown = operations.toSorted((a, b) => a.start - b.start);
  const story = { key, operations: shown, earlier: 0, others, from: [], culprit, possible: [] };
  return { ...story, text: tell(story) };
}

function attempt<S>(
  search: HistorySearch<S>,
  start: Position<S>,
  skip: ReadonlySet<number>,
  time: Clock,
): Violation<S> | undefined {
  try {
    const { found } = search.from(start, Infinity, time, skip);
    return found.verdict === "violation" ? found : undefined;
  } catch (error) {
    if (error instanceof OutOfTime) return undefined;
    throw error;
  }
}

/** Those that were open then, or came later; and, of those that never came back, all. */
function inWindow<S>(search: HistorySearch<S>, from: number, violation: Violation<S>) {
  const over = new Set(
    search.events
      .slice(0, from)
      .filter(({ kind }) => kind === "return")
      .map(({ entry }) => entry.index),
  );
  const called = search.events.slice(0, violation.event + 1).filter(({ kind }) => kind === "call");
  return called.map(({ entry }) => entry).filter(({ index }) => !over.has(index));
}

/** The last place before the culprit's call with one state, or two; with a few others, to show what led to it. */
function beginning<S>(search: HistorySearch<S>, violation: Violation<S>): Position<S> {
  const called = search.events.findIndex(({ entry }) => entry === violation.culprit);
  const fit = (states: number) =>
    violation.rests.findLast(
      (rest) =>
        rest.event <= called &&
        new Set(rest.ways.map(({ state }) => state)).size <= states &&
        inWindow(search, rest.event, violation).filter(({ effect }) => effect !== "read").length >= 3,
    );
  const [one, two] = [fit(1), fit(2)];
  const size = (rest: Position<S>) => inWindow(search, rest.event, violation).length;
  if (one && two) return size(one) <= size(two) + 6 ? one : two;
  return one ?? two ?? search.beginning;
}

function unique(texts: readonly string[]): string[] {
  return [...new Set(texts)];
}

function plural(count: number, word: string): string {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

function tell(story: Omit<Counterexample, "text">): string {
  const { key, operations, earlier, others, from, culprit, possible } = story;
  const rest = others > 0 ? `, whatever ${plural(others, "other")} did` : "";
  const before = earlier > 0 ? `After ${plural(earlier, "operation")}: ` : "At first: ";
  const until = `: until it came back, all that was possible is: ${either(possible)}`;
  return [
    `No order of the operations on ${textOf(key)} explains this${rest}.${from.length > 0 ? ` ${before}${either(from)}.` : ""}`,
    "",
    draw(operations, culprit),
    "",
    `${shown(culprit)} by ${culprit.process} cannot be explained${possible.length > 0 ? until : ""}.`,
  ].join("\n");
}
