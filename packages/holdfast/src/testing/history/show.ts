/** A history as people read it: a row for each process, a bar for each operation. */
import { type Operation, textOf } from "./operation.ts";

function short(text: string, most: number): string {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** "take 3 → true". */
export function shown({ call, input, outcome, output }: Operation): string {
  const given = input === undefined || input === null ? "" : ` ${short(textOf(input), 32)}`;
  if (outcome === "unknown") return `${call}${given}`;
  return `${call}${given}${output === undefined ? "" : ` → ${short(textOf(output), 32)}`}`;
}

/** Of a process that does several things at the same time, as many rows as it takes. */
function rows(operations: readonly Operation[]): { process: string; bars: Operation[] }[] {
  const all: { process: string; bars: Operation[] }[] = [];
  for (const operation of operations.toSorted((a, b) => a.start - b.start)) {
    const { process, start } = operation;
    const free = all.find((row) => row.process === process && (row.bars.at(-1)?.end ?? -1) < start);
    if (free) free.bars.push(operation);
    else all.push({ process, bars: [operation] });
  }
  return all.toSorted((a, b) => (a.process < b.process ? -1 : a.process > b.process ? 1 : 0));
}

interface Columns {
  readonly left: ReadonlyMap<Operation, number>;
  readonly right: ReadonlyMap<Operation, number>;
  readonly last: number;
}

/** Calls and returns in their order, as far apart as the words between them need. */
function columns(operations: readonly Operation[], marked: Operation | undefined): Columns {
  const cut = (operation: Operation) => Math.min(operation.end, marked?.end ?? Infinity);
  const events = operations
    .flatMap((operation) => [
      { operation, at: operation.start, end: false },
      ...(operation.end <= cut(operation) ? [{ operation, at: operation.end, end: true }] : []),
    ])
    .toSorted((a, b) => a.at - b.at || Number(a.end) - Number(b.end));
  const left = new Map<Operation, number>();
  const right = new Map<Operation, number>();
  let column = -2;
  for (const { operation, end } of events) {
    column += 2;
    if (end) column = Math.max(column, (left.get(operation) ?? 0) + shown(operation).length + 5);
    (end ? right : left).set(operation, column);
  }
  const open = operations.filter((operation) => !right.has(operation));
  const needed = open.map((operation) => (left.get(operation) ?? 0) + shown(operation).length + 5);
  return { left, right, last: Math.max(column, ...needed) };
}

/** `marked`: the one that cannot be placed. Those that were not back when it was end in "?" or "…". */
export function draw(operations: readonly Operation[], marked?: Operation): string {
  const { left, right, last } = columns(operations, marked);
  const width = Math.max(...operations.map(({ process }) => process.length));
  return rows(operations)
    .map(({ process, bars }) => {
      let line = "";
      for (const operation of bars) {
        const to = right.get(operation);
        const room = (to ?? last) - (left.get(operation) ?? 0);
        const head = `├─ ${shown(operation)} `;
        const end = to === undefined ? (operation.outcome === "unknown" ? "?" : "…") : "┤";
        line = line.padEnd(left.get(operation) ?? 0) + head + "─".repeat(Math.max(0, room - head.length));
        line += operation === marked ? `${end} ✗` : end;
      }
      return `${process.padEnd(width)}  ${line}`;
    })
    .join("\n");
}

/** "a, b or c". */
export function either(texts: readonly string[], most = 4): string {
  const some = texts.length > most ? [...texts.slice(0, most), `${texts.length - most} more`] : texts;
  return some.length < 2 ? (some[0] ?? "") : `${some.slice(0, -1).join(", ")} or ${some.at(-1)}`;
}
