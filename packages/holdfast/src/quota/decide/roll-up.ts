/**
 * Old lines made one. It has the version of the last of them, and how it stood after that; `amount` is the sum of what was
 * used, `delta` and `forgotten` are sums too, so that the chain goes on; counts and sums by kind are in its details.
 *
 * - The newest line of a bucket stays, and so does what comes after a line that is not that old, should the clock have
 *   been set back.
 * - Lines that do not add up are left as they are, or the evidence would be gone. What was wrong before a repair has been
 *   seen to.
 * - A sum that is larger than what can be counted exactly is not made: then fewer lines become one.
 */
import { ownId } from "./own-id.ts";
import { type BucketRow, type LineRow, deltaOf, mostUsed, unusual } from "./rows.ts";
import { countedKinds } from "./windows.ts";

export interface RollUpView {
  readonly bucket: BucketRow;
  /** From the roll-up on, in the order of their versions; some more than are to become one. */
  readonly lines: readonly LineRow[];
}

export type RollUpDecided =
  | { readonly kind: "nothing" | "broken" }
  | {
      readonly kind: "rolled up";
      /** How many lines became part of it, besides a roll-up that was there. */
      readonly gone: number;
      /** Instead of these, up to its version. */
      readonly line: LineRow;
      readonly from: number;
    };

export function decideRollUp({ bucket, lines }: RollUpView, before: number, most: number): RollUpDecided {
  const old = oldLines(lines.slice(0, most + 1), bucket.version, before);
  const last = old.at(-1);
  if (!last || old.every(({ kind }) => kind === "rollup")) return { kind: "nothing" };
  if (!addsUp(old)) return { kind: "broken" };
  const delta = total(old.map(deltaOf));
  const amount = total(old.map(usedBy));
  const line: LineRow = {
    ...last,
    kind: "rollup",
    id: ownId("rollup", last.version),
    entry: undefined,
    amount,
    delta: unusual(delta, amount),
    forgotten: unusual(delta - last.used, 0),
    refunded: undefined,
    first: 1,
    drains: undefined,
    details: { kinds: kindsOf(old) },
  };
  const gone = old.filter(({ kind }) => kind !== "rollup").length;
  return { kind: "rolled up", gone, line, from: bucket.rolled ?? 0 };
}

const usedBy = ({ kind, amount }: LineRow): number =>
  countedKinds.includes(kind) || kind === "rollup" ? amount : 0;

/** Up to the first one that is not that old, or the newest, or with which the sums could not be exact any more. */
function oldLines(lines: readonly LineRow[], newest: number, before: number): readonly LineRow[] {
  let [amounts, deltas] = [0, 0];
  const stop = lines.findIndex((line) => {
    amounts += usedBy(line);
    deltas += Math.abs(deltaOf(line));
    return line.at >= before || line.version >= newest || Math.max(amounts, deltas) > mostUsed;
  });
  return stop < 0 ? lines : lines.slice(0, stop);
}

function addsUp(lines: readonly LineRow[]): boolean {
  const from = Math.max(
    0,
    lines.findLastIndex(({ kind }) => kind === "repair"),
  );
  const mended = lines[from]?.kind === "repair";
  let before = { version: 0, used: 0 };
  return lines.slice(from).every((line, i) => {
    const { version, used, first, forgotten } = line;
    const follows =
      (first ?? version) === before.version + 1 && used === before.used - (forgotten ?? 0) + deltaOf(line);
    before = line;
    return follows || (mended && i === 0);
  });
}

type Kinds = Record<string, { lines: number; amount: number }>;

function kindsOf(lines: readonly LineRow[]): Kinds {
  const kinds: Kinds = {};
  const add = (kind: string, count: number, amount: number) => {
    const { lines: before = 0, amount: sum = 0 } = kinds[kind] ?? {};
    kinds[kind] = { lines: before + count, amount: sum + amount };
  };
  for (const { kind, amount, details } of lines) {
    if (kind !== "rollup") add(kind, 1, amount);
    else
      for (const [each, sums] of Object.entries((details as { kinds?: Kinds } | undefined)?.kinds ?? {}))
        add(each, sums.lines, sums.amount);
  }
  return kinds;
}

const total = (values: readonly number[]): number => values.reduce((sum, value) => sum + value, 0);
