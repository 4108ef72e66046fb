/** What the movements of a level come to, and how level and movements are made to agree: pure. */
import { UsageError } from "../../seam/errors.ts";
import type { LevelRow, MovementRow } from "./rows.ts";
import type { Break, Facts, StockRepair } from "../store.ts";

/** Movements of one level, from the first one on. */
export interface StockLedger {
  readonly count: number;
  readonly sum: number;
  readonly newest: { readonly version: number; readonly balance: number } | undefined;
  /** Those that do not follow from the one before, since the last repair. */
  readonly breaks: readonly Break[];
  /** What they come to. A repair, or the first one after a gap, says what was there: what came before is not counted. */
  readonly onHand: number;
}

export const emptyLedger: StockLedger = { count: 0, sum: 0, newest: undefined, breaks: [], onHand: 0 };

type StockEntry = Pick<MovementRow, "version" | "quantity" | "balance" | "kind" | "at">;

/** With the next ones, in the order of their versions. */
export function extend(ledger: StockLedger, movements: readonly StockEntry[]): StockLedger {
  let { count, sum, newest, onHand } = ledger;
  let breaks = [...ledger.breaks];
  for (const { version, quantity, balance, kind, at } of movements) {
    const gap = version !== (newest?.version ?? 0) + 1;
    if (kind === "repair") breaks = [];
    else if (gap || balance !== (newest?.balance ?? 0) + quantity)
      breaks.push({ version, quantity, balance, before: newest, at: at / 1000 });
    onHand = kind === "repair" || gap ? balance : onHand + quantity;
    newest = { version, balance };
    sum += quantity;
    count++;
  }
  return { count, sum, newest, breaks, onHand };
}

/** `open`: what its lines of reservations come to. */
export function factsOf(level: LevelRow, ledger: StockLedger, open: number): Facts {
  return {
    sku: level.sku,
    location: level.location,
    onHand: level.on_hand,
    reserved: level.reserved,
    version: level.version,
    open,
    sum: ledger.sum,
    movements: ledger.count,
    newest: ledger.newest,
    breaks: ledger.breaks,
  };
}

/**
 * A movement of what the movements lack, and the level after it. Trusting the ledger, what is on hand becomes what the
 * movements come to; trusting the levels, it stays. Either way, what is open is what is reserved.
 */
export function decideRepair(
  level: LevelRow,
  ledger: StockLedger,
  open: number,
  at: number,
  { id, trust, about }: StockRepair,
): { readonly level: LevelRow; readonly movement: MovementRow } {
  const onHand = trust === "ledger" ? ledger.onHand : level.on_hand;
  if (!level.elsewhere && onHand - open < level.min_level)
    throw new UsageError(
      trust === "ledger"
        ? `the movements of ${level.sku} at ${level.location} come to ${onHand}, and ${open} are reserved, ${level.min_level} have to stay: release reservations, lower the minimum, or trust the levels`
        : `${onHand} of ${level.sku} are at ${level.location}, and ${open} are reserved, ${level.min_level} have to stay: release reservations, or lower the minimum`,
    );
  const version = (ledger.newest?.version ?? 0) + 1;
  return {
    level: { ...level, on_hand: onHand, reserved: open, version },
    movement: {
      level: level.id,
      version,
      quantity: onHand - ledger.sum,
      balance: onHand,
      at,
      line: 1,
      parts: 1,
      kind: "repair",
      source: about.source,
      external_id: id,
      reference_type: undefined,
      reference_id: undefined,
      user_id: about.by,
      note: about.note,
      origin: undefined,
    },
  };
}

/** Whether there is nothing to find in it. */
export function addsUp({ onHand, reserved, version, open, sum, newest, breaks }: Facts): boolean {
  return (
    onHand === sum &&
    reserved === open &&
    onHand === (newest?.balance ?? 0) &&
    version === (newest?.version ?? 0) &&
    breaks.length === 0
  );
}
