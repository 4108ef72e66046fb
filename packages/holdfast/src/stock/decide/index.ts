/**
 * What stock decides, and what is written then: the rules, without a database, a clock or chance. Stores read, ask here,
 * and write; functions on a server that decide by themselves are held equal to this by tests.
 *
 * **A level** is a SKU at a location. Its room is what is on hand, less what is reserved, less its minimum. What takes or
 * reserves needs room for it; what adds does not, also where the room is below 0 already.
 *
 * **Calls** are decided in the order in which they came, by one moment, each with all of its lines or none:
 *
 * 1. A line whose level is not there: "unknown level". Levels that something is put into are made first.
 * 2. Of what moves (all but "reserve" and "release"), an id that has a movement at one of the levels was used before.
 *    "before", with the answer of then, if all of its lines are there, of one call of as many lines, of the same kind and
 *    quantities, and (but for "commit") of the same source, reference and origin; else "conflict". The quantity of "adjust"
 *    is what was counted, so the balance; that of "return" may have been left open.
 * 3. "reserve", "commit" and "release" look at the reservation. It is over ("expired") when it is open and its time has come:
 *    at that very moment already. One with other lines: "conflict".
 *    - "reserve": none: it is made. Open or committed: "before". Released: "ended". Expired: what it still has is given
 *      back, and it is made again; who made it, and what for, stays as it was.
 *    - "commit": none: "unknown". Not open: "ended". If some of its lines are gone, it had run out by another clock: it ends now,
 *      what is left of it is given back, "ended".
 *    - "release": none: "unknown". Released: "before". Committed: "ended". Else what it still has is given back.
 * 4. "return" looks at what was sold at each level under the id of the sale, by "apply" or "commit": nothing: "unknown".
 *    What is left of it is without what came back. More than that, or nothing left: "too much". A quantity that was left
 *    open is all that is left.
 * 5. The rest needs room: "adjust" for the difference to what is on hand, the others for what they take. Where there is too
 *    little, lines of reservations that have run out are cleared away, of that level, and stay so whatever becomes of the call.
 *    Still too little: "short", and every line says what there is. What "commit" takes was its own: its lines do not count.
 * 6. Each line that moves something counts its level's version up by one, and is a movement with the balance after it.
 *
 * No level may come to have more on hand than can be counted exactly, nor that much below 0: that throws.
 */
import { tooMuch } from "./amount.ts";
import { compareSpots, room, spotName } from "../domain.ts";
import type { LevelRow, MovementRow, ReservationRow, ReservedRow } from "./rows.ts";
import type { MovementAbout, LineVerdict, StockOutcome, Spot, OrderVerdict } from "../store.ts";

/** An order, or a sequel whose lines have been found. */
export interface StockCall {
  readonly kind: "apply" | "adjust" | "transfer" | "reserve" | "commit" | "release" | "return";
  readonly id: string;
  /** Of "return": the id of the sale. Of "reserve", "commit", "release": that of the reservation. */
  readonly of: string | undefined;
  /** Each level once. `quantity` undefined: all that is left, of "return". */
  readonly lines: readonly (Spot & { readonly quantity: number | undefined })[];
  readonly about: MovementAbout;
  readonly ttlMs: number | undefined;
}

/** What was read. Of what is undefined nothing has been read. */
export interface StockView {
  readonly book: string;
  /** By the database's clock, read when all levels were locked, or with them. */
  readonly at: number;
  /** All of the calls' that are there. */
  readonly levels: readonly LevelRow[];
  /** At these levels, under ids of the calls, and of what they return. Undefined: ids have not been used before. */
  readonly movements: readonly MovementRow[] | undefined;
  /** What came back of the sales, by level. */
  readonly returned: readonly {
    readonly origin: string;
    readonly level: number;
    readonly quantity: number;
  }[];
  /** Those that the calls name. */
  readonly reservations: readonly ReservationRow[];
  /** Their lines, and those of the levels in `cleared` that have run out by `at`. */
  readonly reserved: readonly ReservedRow[];
  readonly cleared: ReadonlySet<number>;
}

/** What has to be read, or made, before it can be decided. */
export interface StockNeed {
  /** Levels to be made: something is put into them. */
  readonly levels: readonly Spot[];
  /** Numbers of levels that are short: which lines of reservations have run out? */
  readonly cleared: readonly number[];
}

/** In this order: levels first, and deletes before inserts. */
export interface StockWrites {
  readonly levels: readonly StockChange<LevelRow>[];
  readonly movements: readonly MovementRow[];
  readonly reservations: {
    readonly insert: readonly ReservationRow[];
    readonly update: readonly StockChange<ReservationRow>[];
  };
  readonly reserved: { readonly delete: readonly ReservedRow[]; readonly insert: readonly ReservedRow[] };
  /** By the database's clock, the decision holds before this moment; undefined: at any. */
  readonly until: number | undefined;
}

export interface StockChange<Row> {
  readonly before: Row;
  readonly after: Row;
}

export type StockDecision<T> =
  { readonly need: StockNeed } | { readonly verdicts: T; readonly writes: StockWrites };

export function decide(view: StockView, calls: readonly StockCall[]): StockDecision<readonly OrderVerdict[]> {
  const sheet = new Sheet(view);
  const levels = spotsOf(calls, (call, line) => putsInto(call, line) && !sheet.level(line));
  if (levels.length > 0) return { need: { levels, cleared: [] } };
  return sheet.decision(calls.map((call) => decideOne(sheet, call)));
}

/** Each level once, in the order that is everybody's. */
export function spotsOf(
  calls: readonly StockCall[],
  which: (call: StockCall, line: StockCall["lines"][number]) => boolean = () => true,
): Spot[] {
  const found = new Map<string, Spot>();
  for (const call of calls)
    for (const line of call.lines) if (which(call, line)) found.set(spotName(line), line);
  return [...found.values()].toSorted(compareSpots);
}

/** Whether a line may be of a level that is not there yet. */
export function putsInto(
  { kind }: StockCall,
  { quantity = 0 }: { readonly quantity: number | undefined },
): boolean {
  return kind === "adjust" || ((kind === "apply" || kind === "transfer") && quantity >= 0);
}

function moves({ kind }: StockCall): boolean {
  return kind !== "reserve" && kind !== "release";
}

/** What is found out about a call, line by line. */
class StockDraft {
  readonly call: StockCall;
  at: number;
  until: number | undefined;
  state: string | undefined;
  readonly lines: DraftLine[];

  constructor(sheet: Sheet, call: StockCall) {
    this.call = call;
    this.at = sheet.view.at;
    this.lines = call.lines.map(({ sku, location, quantity }) => {
      const level = sheet.level({ sku, location });
      return {
        sku,
        location,
        asked: quantity,
        level: level?.id,
        moved: undefined,
        onHand: 0,
        version: 0,
        room: level && roomOf(level),
      };
    });
  }

  /** Of calls whose levels are all there. */
  get levels(): number[] {
    return this.lines.map(({ level }) => level as number);
  }

  verdict(outcome: StockOutcome): OrderVerdict {
    const sequel = this.call.kind === "commit" || this.call.kind === "release" || this.call.kind === "return";
    return {
      outcome,
      at: this.at / 1000,
      until: this.until === undefined ? undefined : this.until / 1000,
      state: this.state,
      lines: this.lines.map(
        ({ sku, location, asked = 0, moved, onHand, version, room: left }): LineVerdict => ({
          sku,
          location,
          quantity: moved ?? (sequel ? 0 : asked),
          onHand,
          version,
          room: left,
        }),
      ),
    };
  }
}

interface DraftLine extends Spot {
  readonly asked: number | undefined;
  readonly level: number | undefined;
  moved: number | undefined;
  onHand: number;
  version: number;
  room: number | undefined;
}

const roomOf = ({ on_hand, reserved, min_level }: LevelRow) =>
  room({ onHand: on_hand, reserved, min: min_level });

function decideOne(sheet: Sheet, call: StockCall): OrderVerdict {
  const draft = new StockDraft(sheet, call);
  if (draft.lines.some(({ level }) => level === undefined)) return draft.verdict("unknown level");
  const refused = repeated(sheet, draft) ?? reservation(sheet, draft) ?? shortage(sheet, draft);
  if (refused) return draft.verdict(refused);
  write(sheet, draft);
  return draft.verdict("done");
}

/** Rule 2. Undefined: the id is new. */
function repeated(sheet: Sheet, draft: StockDraft): StockOutcome | undefined {
  const { call, lines } = draft;
  if (!moves(call)) return undefined;
  const found = draft.levels.map((level) => sheet.movement(call.id, level));
  const [first] = found;
  let same = true;
  for (const [i, line] of lines.entries()) {
    const movement = found[i];
    same &&= movement !== undefined && isSame(movement, call, line.asked) && movement.at === first?.at;
    if (!movement) continue;
    line.moved = movement.quantity;
    line.onHand = movement.balance;
    line.version = movement.version;
  }
  if (found.every((movement) => movement === undefined)) return undefined;
  if (!same) return "conflict";
  draft.at = (first as MovementRow).at;
  return "before";
}

function isSame(movement: MovementRow, call: StockCall, asked: number | undefined): boolean {
  const { kind, about } = call;
  const amount =
    kind === "adjust" ? movement.balance : kind === "commit" ? -movement.quantity : movement.quantity;
  return (
    movement.kind === kind &&
    movement.parts === call.lines.length &&
    (asked === undefined || asked === amount) &&
    (kind === "commit" ||
      (movement.source === about.source &&
        movement.reference_type === about.referenceType &&
        movement.reference_id === about.referenceId &&
        movement.origin === (kind === "return" ? call.of : undefined)))
  );
}

/** Rule 3. Undefined: it may go on. */
function reservation(sheet: Sheet, draft: StockDraft): StockOutcome | undefined {
  const { call } = draft;
  if (call.kind !== "reserve" && call.kind !== "commit" && call.kind !== "release") return undefined;
  const row = sheet.reservations.get(call.of as string);
  if (!row) return call.kind === "reserve" ? undefined : "unknown";
  draft.until = row.until;
  draft.state = row.state === "open" && row.until <= sheet.view.at ? "expired" : row.state;
  const quantities = draft.lines.map(({ asked }) => asked as number);
  if (!sameList(row.levels, draft.levels) || !sameList(row.quantities, quantities)) return "conflict";
  switch (call.kind) {
    case "reserve":
      return reserved(sheet, draft, row);
    case "commit":
      if (draft.state !== "open") return "ended";
      return complete(sheet, draft, row);
    case "release":
      if (draft.state === "released") return "before";
      if (draft.state === "committed") return "ended";
      sheet.giveBack(row);
  }
  return undefined;
}

function sameList(a: readonly number[], b: readonly number[]): boolean {
  return a.length === b.length && a.every((value, i) => value === b[i]);
}

/** One of that id was made before. */
function reserved(sheet: Sheet, draft: StockDraft, row: ReservationRow): StockOutcome | undefined {
  if (draft.state === "released") return "ended";
  if (draft.state === "expired") {
    sheet.giveBack(row);
    return undefined;
  }
  draft.at = row.made_at;
  for (const line of draft.lines) {
    const level = sheet.level(line) as LevelRow;
    line.moved = line.asked;
    line.onHand = level.on_hand;
    line.version = level.version;
  }
  return "before";
}

/** All of its lines must be there still. */
function complete(sheet: Sheet, draft: StockDraft, row: ReservationRow): StockOutcome | undefined {
  if (row.levels.every((level) => sheet.line(level, row.id))) {
    sheet.holdsUntil(row.until);
    return undefined;
  }
  sheet.giveBack(row);
  sheet.reservations.set(row.id, { ...row, until: sheet.view.at });
  draft.state = "expired";
  return "ended";
}

/** Rules 4 and 5: is there enough, of every line? Undefined: there is. */
function shortage(sheet: Sheet, draft: StockDraft): StockOutcome | undefined {
  const { call, lines } = draft;
  if (call.kind === "release") return undefined;
  let outcome: StockOutcome | undefined;
  for (const line of lines)
    if (call.kind === "return") {
      const left = leftOf(sheet, call.of as string, line.level as number);
      if (left === undefined) return "unknown";
      line.room = left;
      line.moved = line.asked ?? left;
      if (line.moved > left || left === 0) outcome = "too much";
    } else if (!fits(sheet, call, line)) outcome = "short";
  return outcome;
}

/** Of a sale at a level; undefined: nothing was sold there. */
function leftOf(sheet: Sheet, sale: string, level: number): number | undefined {
  const sold = sheet.movement(sale, level);
  if (!sold || sold.quantity >= 0 || (sold.kind !== "apply" && sold.kind !== "commit")) return undefined;
  return -sold.quantity - sheet.returned(sale, level);
}

function fits(sheet: Sheet, call: StockCall, line: DraftLine): boolean {
  const asked = line.asked as number;
  const level = sheet.level(line) as LevelRow;
  const own = call.kind === "commit" ? (sheet.line(level.id, call.of as string)?.quantity ?? 0) : 0;
  const change =
    call.kind === "adjust"
      ? asked - level.on_hand
      : call.kind === "reserve" || call.kind === "commit"
        ? -asked
        : asked;
  let left = roomOf(level) + own;
  if (change < 0 && left + change < 0 && level.reserved - own > 0) left = roomOf(sheet.clear(level)) + own;
  line.room = left;
  line.moved = change;
  return change >= 0 || left + change >= 0;
}

/** Rule 6, and what becomes of reservations. */
function write(sheet: Sheet, draft: StockDraft): void {
  const { call, lines } = draft;
  if (call.kind === "reserve") makeReservation(sheet, draft);
  else if (call.kind === "commit" || call.kind === "release") {
    const row = sheet.reservations.get(call.of as string) as ReservationRow;
    sheet.giveBack(row);
    draft.state = call.kind === "commit" ? "committed" : "released";
    sheet.reservations.set(row.id, { ...row, state: draft.state as ReservationRow["state"] });
  }
  for (const [i, line] of lines.entries()) {
    if (moves(call)) sheet.move(call, i + 1, line.level as number, line.moved as number);
    else line.moved = line.asked;
    const level = sheet.level(line) as LevelRow;
    line.onHand = level.on_hand;
    line.version = level.version;
  }
}

function makeReservation(sheet: Sheet, draft: StockDraft): void {
  const { call, lines } = draft;
  const id = call.of as string;
  const until = sheet.view.at + (call.ttlMs as number) * 1000;
  const made_at = sheet.view.at;
  const before = sheet.reservations.get(id);
  const { source, referenceType, referenceId, by, note } = call.about;
  sheet.reservations.set(
    id,
    before
      ? { ...before, until, made_at }
      : {
          book: sheet.view.book,
          id,
          state: "open",
          until,
          made_at,
          levels: draft.levels,
          quantities: lines.map(({ asked }) => asked as number),
          source,
          reference_type: referenceType,
          reference_id: referenceId,
          user_id: by,
          note: note,
        },
  );
  for (const { level, asked } of lines)
    sheet.keep({ level: level as number, reservation: id, quantity: asked as number, until });
  draft.until = until;
  draft.state = "open";
}

/** What was read, and what the calls so far have made of it. */
class Sheet {
  readonly view: StockView;
  readonly reservations: Map<string, ReservationRow>;
  readonly #numbers: ReadonlyMap<string, number>;
  readonly #levels: Map<number, LevelRow>;
  readonly #lines: Map<string, ReservedRow>;
  readonly #movements: Map<string, MovementRow>;
  readonly #returned: Map<string, number>;
  readonly #new: MovementRow[] = [];
  readonly #short = new Set<number>();
  readonly #cleared = new Set<number>();
  #until: number | undefined;

  constructor(view: StockView) {
    this.view = view;
    this.reservations = new Map(view.reservations.map((row) => [row.id, row]));
    this.#numbers = new Map(view.levels.map((row) => [spotName(row), row.id]));
    this.#levels = new Map(view.levels.map((row) => [row.id, row]));
    this.#lines = new Map(view.reserved.map((row) => [at(row.level, row.reservation), row]));
    this.#movements = new Map((view.movements ?? []).map((row) => [at(row.level, row.external_id), row]));
    this.#returned = new Map(view.returned.map((row) => [at(row.level, row.origin), row.quantity]));
  }

  level(spot: Spot): LevelRow | undefined {
    const number = this.#numbers.get(spotName(spot));
    return number === undefined ? undefined : this.#levels.get(number);
  }

  movement(id: string, level: number): MovementRow | undefined {
    return this.#movements.get(at(level, id));
  }

  /** What came back of a sale. */
  returned(sale: string, level: number): number {
    return this.#returned.get(at(level, sale)) ?? 0;
  }

  line(level: number, reservation: string): ReservedRow | undefined {
    return this.#lines.get(at(level, reservation));
  }

  keep(row: ReservedRow): void {
    this.#lines.set(at(row.level, row.reservation), row);
    this.#change(row.level, ({ reserved: kept }) => ({ reserved: kept + row.quantity }));
  }

  #drop(row: ReservedRow): void {
    this.#lines.delete(at(row.level, row.reservation));
    this.#change(row.level, ({ reserved: kept }) => ({ reserved: kept - row.quantity }));
  }

  /** What is still kept apart for it. */
  giveBack(row: ReservationRow): void {
    for (const level of row.levels) {
      const line = this.line(level, row.id);
      if (line) this.#drop(line);
    }
  }

  /** Without lines that have run out; those that came in this batch have not. */
  clear({ id }: LevelRow): LevelRow {
    if (!this.view.cleared.has(id)) this.#short.add(id);
    else if (!this.#cleared.has(id)) {
      this.#cleared.add(id);
      for (const row of this.#lines.values())
        if (row.level === id && row.until <= this.view.at) this.#drop(row);
    }
    return this.#levels.get(id) as LevelRow;
  }

  move(call: StockCall, line: number, level: number, quantity: number): void {
    const { kind, about } = call;
    const { on_hand, version } = this.#change(level, (row) => ({
      on_hand: row.on_hand + quantity,
      version: row.version + 1,
    }));
    if (!Number.isSafeInteger(on_hand)) throw tooMuch();
    const row: MovementRow = {
      level,
      version,
      quantity,
      balance: on_hand,
      at: this.view.at,
      line,
      parts: call.lines.length,
      kind,
      source: about.source,
      external_id: call.id,
      reference_type: about.referenceType,
      reference_id: about.referenceId,
      user_id: about.by,
      note: about.note,
      origin: kind === "return" ? call.of : undefined,
    };
    this.#new.push(row);
    this.#movements.set(at(level, call.id), row);
    if (row.origin !== undefined)
      this.#returned.set(at(level, row.origin), this.returned(row.origin, level) + quantity);
  }

  setMinimum(level: number, min_level: number): void {
    this.#change(level, () => ({ min_level }));
  }

  /** By a clock that is past this, it would be decided otherwise. */
  holdsUntil(moment: number): void {
    this.#until = Math.min(moment, this.#until ?? moment);
  }

  decision<T>(verdicts: T): StockDecision<T> {
    if (this.#short.size > 0) return { need: { levels: [], cleared: [...this.#short] } };
    return { verdicts, writes: this.#writes() };
  }

  #change(number: number, change: (row: LevelRow) => Partial<LevelRow>): LevelRow {
    const row = this.#levels.get(number) as LevelRow;
    const after = { ...row, ...change(row) };
    this.#levels.set(number, after);
    return after;
  }

  #writes(): StockWrites {
    const { view } = this;
    const lines = new Set(this.#lines.values());
    const [known, reservations] = [
      new Set(view.reserved),
      changesOf(view.reservations, [...this.reservations.values()], ({ id }) => id),
    ];
    return {
      levels: changesOf(view.levels, [...this.#levels.values()], ({ id }) => String(id)).update,
      movements: this.#new,
      reservations,
      reserved: {
        delete: view.reserved.filter((row) => !lines.has(row)),
        insert: [...lines].filter((row) => !known.has(row)),
      },
      until: this.#until,
    };
  }
}

/** Neither part contains NUL. */
const at = (level: number, id: string) => `${level}\0${id}`;

function changesOf<Row extends object>(
  before: readonly Row[],
  after: readonly Row[],
  name: (row: Row) => string,
): { readonly insert: readonly Row[]; readonly update: readonly StockChange<Row>[] } {
  const known = new Map(before.map((row) => [name(row), row]));
  const insert: Row[] = [];
  const update: StockChange<Row>[] = [];
  for (const row of after) {
    const old = known.get(name(row));
    if (!old) insert.push(row);
    else if (Object.entries(row).some(([column, value]) => old[column as keyof Row] !== value))
      update.push({ before: old, after: row });
  }
  return { insert, update };
}

/**
 * The least that has to stay. "short" if less is there than that, without what is reserved, also when what has run out is
 * cleared away; a level in the caller's own table takes any. A level that is not there is made.
 */
export function decideMinimum(view: StockView, spot: Spot, min: number): StockDecision<OrderVerdict> {
  const sheet = new Sheet(view);
  let level = sheet.level(spot);
  if (!level) return { need: { levels: [spot], cleared: [] } };
  if (level.on_hand - level.reserved < min) level = sheet.clear(level);
  const left = level.on_hand - level.reserved;
  const done = left >= min || level.elsewhere;
  if (done) sheet.setMinimum(level.id, min);
  const { on_hand: onHand, version } = level;
  return sheet.decision<OrderVerdict>({
    outcome: done ? "done" : "short",
    at: view.at / 1000,
    until: undefined,
    state: undefined,
    lines: [{ sku: spot.sku, location: spot.location, quantity: 0, onHand, version, room: left }],
  });
}
