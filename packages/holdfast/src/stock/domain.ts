/** What is true of stock wherever it is kept: pure, without a database. */
import type { Facts, OrderLine, Spot } from "./store.ts";

export interface Level extends Spot {
  readonly onHand: number;
  readonly reserved: number;
  /** Never below this; negative: so many may be sold that are not there yet. */
  readonly min: number;
}

export interface Shortage extends Spot {
  readonly requested: number;
  readonly available: number;
  readonly short: number;
}

/** What can be taken or reserved. */
export function room({ onHand, reserved, min }: Pick<Level, "onHand" | "reserved" | "min">): number {
  return onHand - reserved - min;
}

/** Code units, as "C" collation and Buffer.compare order them: the same order for everybody, whatever the language. */
export function compareSpots(a: Spot, b: Spot): number {
  return compareBytes(a.sku, b.sku) || compareBytes(a.location, b.location);
}

function compareBytes(a: string, b: string): number {
  if (a === b) return 0;
  return Buffer.compare(Buffer.from(a), Buffer.from(b));
}

/** Unambiguous: neither part contains NUL. */
export function spotName({ sku, location }: Spot): string {
  return `${sku}\0${location}`;
}

/** Lines of one SKU at one location are one line: each by itself might fit where both do not. */
export function sumLines(lines: readonly OrderLine[]): OrderLine[] {
  if (lines.length === 1) return [...lines];
  const sums = new Map<string, OrderLine>();
  for (const line of lines) {
    const name = spotName(line);
    const known = sums.get(name);
    sums.set(name, known ? { ...known, quantity: known.quantity + line.quantity } : line);
  }
  return [...sums.values()].toSorted(compareSpots);
}

/** Which lines do not fit, all of them: an order is refused once, not once per line. */
export function shortages(
  lines: readonly OrderLine[],
  levelOf: (spot: Spot) => Level | undefined,
): Shortage[] {
  return lines.flatMap((line) => {
    const level = levelOf(line);
    const available = level ? room(level) : 0;
    if (line.quantity >= 0 || available + line.quantity >= 0) return [];
    return [shortage(line, -line.quantity, available)];
  });
}

export function shortage({ sku, location }: Spot, requested: number, available: number): Shortage {
  return { sku, location, requested, available, short: requested - available };
}

/** An order, taken whole or not at all: the levels after it, or what was short. */
export function take(
  levels: ReadonlyMap<string, Level>,
  lines: readonly OrderLine[],
): { readonly levels: ReadonlyMap<string, Level> } | { readonly short: readonly Shortage[] } {
  const summed = sumLines(lines);
  const short = shortages(summed, (spot) => levels.get(spotName(spot)));
  if (short.length > 0) return { short };
  const after = new Map(levels);
  for (const line of summed) {
    const name = spotName(line);
    const { sku, location, quantity } = line;
    const level = after.get(name) ?? { sku, location, onHand: 0, reserved: 0, min: 0 };
    after.set(name, { ...level, onHand: level.onHand + quantity });
  }
  return { levels: after };
}

/** The same lines, whatever the order in which they were written. */
export function sameLines(a: readonly OrderLine[], b: readonly OrderLine[]): boolean {
  return (
    a.length === b.length &&
    a.every((line, i) => {
      const other = b[i] as OrderLine;
      return line.sku === other.sku && line.location === other.location && line.quantity === other.quantity;
    })
  );
}

/**
 * Spreads an order over locations, in the order in which these are named: as few lines as the first that has it all, else
 * what each of them has. What nobody has is short.
 */
export function splitOrder(
  wanted: readonly { readonly sku: string; readonly quantity: number }[],
  levels: readonly Level[],
  locations: readonly string[],
): { readonly lines: readonly OrderLine[]; readonly short: readonly Shortage[] } {
  const left = new Map(levels.map((level) => [spotName(level), Math.max(0, room(level))]));
  const lines: OrderLine[] = [];
  const short: Shortage[] = [];
  const sums = new Map<string, number>();
  for (const { sku, quantity } of wanted) sums.set(sku, (sums.get(sku) ?? 0) + quantity);
  for (const [sku, quantity] of sums) {
    const at = (location: string) => left.get(spotName({ sku, location })) ?? 0;
    const whole = locations.find((location) => at(location) >= quantity);
    let missing = quantity;
    for (const location of whole === undefined ? locations : [whole]) {
      const some = Math.min(missing, at(location));
      if (some === 0) continue;
      left.set(spotName({ sku, location }), at(location) - some);
      lines.push({ sku, location, quantity: -some });
      missing -= some;
    }
    if (missing > 0)
      short.push(shortage({ sku, location: locations.join(", ") }, quantity, quantity - missing));
  }
  return { lines: lines.toSorted(compareSpots), short };
}

export interface Finding extends Spot {
  readonly problem: "level" | "chain" | "gap" | "version" | "reserved";
  /** What it is, in words. */
  readonly text: string;
  /** By how much the level is above what its movements come to; of "reserved", above what is open. */
  readonly difference: number;
}

/** What does not add up, and what may have happened. */
export function explain(facts: Facts): Finding[] {
  const { sku, location, onHand, reserved, version, open, sum, newest, breaks } = facts;
  const findings: Finding[] = [];
  const found = (problem: Finding["problem"], difference: number, text: string) =>
    findings.push({ sku, location, problem, difference, text: `${sku} at ${location}: ${text}` });
  if (onHand !== sum) found("level", onHand - sum, `${onHand} on hand, but its movements come to ${sum}`);
  if (newest && onHand !== newest.balance)
    found(
      "level",
      onHand - newest.balance,
      `it was changed by ${signed(onHand - newest.balance)} without a movement after version ${newest.version}, which left ${newest.balance}`,
    );
  for (const each of breaks) {
    const { before } = each;
    const expected = (before?.version ?? 0) + 1;
    if (each.version !== expected)
      found(
        "gap",
        0,
        expected === each.version - 1
          ? `the movement of version ${expected} is missing`
          : `movements of versions ${expected} to ${each.version - 1} are missing`,
      );
    const difference = each.balance - each.quantity - (before?.balance ?? 0);
    if (difference !== 0)
      found(
        "chain",
        difference,
        `${before?.balance ?? 0} before version ${each.version}, ${signed(each.quantity)}, and ${each.balance} after: it was changed by ${signed(difference)} without a movement before ${new Date(each.at).toISOString()}`,
      );
  }
  if (version !== (newest?.version ?? 0))
    found("version", 0, `the level is at version ${version}, its newest movement at ${newest?.version ?? 0}`);
  if (reserved !== open)
    found("reserved", reserved - open, `${reserved} are kept apart, but open reservations come to ${open}`);
  return findings;
}

function signed(n: number): string {
  return n > 0 ? `+${n}` : String(n);
}
