import type { DriverError, Result, Row, SqlConnection } from "../../../seam/database.ts";
import { SchemaMissingError, UsageError } from "../../../seam/errors.ts";
import { type Names, type Statement, own, sql } from "../../../seam/sql.ts";
import type {
  StockBook,
  Break,
  Facts,
  LineVerdict,
  MovementFilter,
  StockOrder,
  OrderLine,
  StockOutcome,
  Sequel,
  StockLists,
  StockMovement,
  StockOwnTables,
  StockStore,
  StockUpkeep,
  OrderVerdict,
} from "../../../stock/store.ts";
import { tooMuch } from "../../../stock/decide/amount.ts";
import { dialect, namesOf } from "../dialect.ts";
import { violated } from "../errors.ts";
import { failureOf } from "../locks/index.ts";
import { byMap, impatient, patiently } from "../patience.ts";
import { isTrue } from "../probe.ts";
import { callersPath, safely } from "../search-path.ts";
import { list, momentOf, numbers } from "../values.ts";

const outcomes: readonly StockOutcome[] = [
  "short",
  "done",
  "before",
  "conflict",
  "unknown level",
  "unknown",
  "too much",
  "ended",
];

async function ask(connection: SqlConnection, statement: Statement): Promise<readonly Row[]> {
  return answered(connection, rowsOf(connection.query(statement)));
}

/** What compares and computes by itself, and touches no table of the caller's. */
const askSafely = (connection: SqlConnection, statement: Statement): Promise<readonly Row[]> =>
  answered(connection, safely(connection, statement));

const rowsOf = async (asking: Promise<Result>) => (await asking).rows;

/** Of statements that come again and again: at one caller, parsing and planning took as long as what they do. */
async function askOften(connection: SqlConnection, statement: Statement): Promise<readonly Row[]> {
  return answered(connection, rowsOf(connection.prepared?.(statement) ?? connection.query(statement)));
}

async function answered(connection: SqlConnection, asking: Promise<readonly Row[]>): Promise<readonly Row[]> {
  return asking.catch((error: unknown) => {
    // A table of the caller's that is not there is the caller's error.
    const ours = error instanceof Error && error.message.includes(namesOf(connection).schema);
    if (isTooMuch(connection, error)) throw tooMuch(error);
    throw ours && failureOf(connection, error) === "schema-missing"
      ? new SchemaMissingError("A table or function of stock", error)
      : error;
  });
}

/** Beyond what JavaScript counts exactly, or beyond what the server counts at all. Some clients tell the constraint in words only. */
function isTooMuch(connection: SqlConnection, error: unknown): boolean {
  const driver = (connection.unwrap?.(error) ?? error ?? {}) as DriverError;
  if (driver.code === "22003") return true;
  if (failureOf(connection, error) !== "check") return false;
  const rule = driver.violated?.constraint ?? violated(driver).constraint;
  return (
    rule === "stock_level_range" || (rule === undefined && /\bstock_level_range\b/.test(driver.message ?? ""))
  );
}

/** The search path of the session, for what is done to a table of the caller's. */
const sessionPath = sql.raw("pg_catalog.current_setting('search_path')");

const place = ({ table }: StockBook, path = sessionPath) =>
  table
    ? sql`pg_catalog.jsonb_set(${JSON.stringify(table)}::pg_catalog.text::pg_catalog.jsonb, '{path}', pg_catalog.to_jsonb(${path}))`
    : sql`NULL::pg_catalog.jsonb`;
const patient = ({ name }: StockBook, waitMs: number) => patiently(waitMs, sql`${name}::pg_catalog.text`);
const text = (value: unknown) => (typeof value === "string" ? value : undefined);

const lists: StockLists<SqlConnection> = {
  async levels(connection, book, { skus, location, after, most }) {
    const these = sql`${skus ? list(skus) : null}::pg_catalog.text::pg_catalog.text[]`;
    const there = sql`${location ?? null}::pg_catalog.text`;
    const all = sql`${own("stock_levels")}(${book.name}::pg_catalog.text, ${place(book, callersPath)}, ${these}, ${there})`;
    const beyond = sql`(${after?.sku ?? ""}::pg_catalog.text COLLATE "C", ${after?.location ?? ""}::pg_catalog.text COLLATE "C")`;
    const page = sql`LIMIT ${most === undefined ? null : String(most)}::pg_catalog.text::int`;
    // The function reads all of them before the first can be had. By the index: 3 ms in place of 100, of 300,000.
    const statement =
      most === undefined && after === undefined
        ? sql`SELECT * FROM ${all}`
        : book.table
          ? sql`SELECT * FROM ${all} t WHERE (t.sku, t.location) > ${beyond} ORDER BY t.sku COLLATE "C", t.location COLLATE "C" ${page}`
          : sql`SELECT t.sku, t.location, t.on_hand, t.reserved - coalesce((SELECT pg_catalog.sum(x.quantity)::bigint FROM ${own("stock_reserved")} x
    WHERE t.reserved > 0 AND x.level = t.id AND x.until <= pg_catalog.clock_timestamp()), 0) AS reserved, t.min_level, t.version
  FROM ${own("stock_level")} t WHERE t.book = ${book.name}::pg_catalog.text AND ${skus ? sql`t.sku = ANY (${these})` : sql`true`}
    AND ${location === undefined ? sql`true` : sql`t.location = ${there}`} AND (t.sku, t.location) > ${beyond}
  ORDER BY t.sku, t.location ${page}`;
    const rows = await askSafely(connection, statement);
    return rows.map((row) => ({
      sku: String(row["sku"]),
      location: String(row["location"]),
      onHand: Number(row["on_hand"]),
      reserved: Number(row["reserved"]),
      min: Number(row["min_level"]),
      version: Number(row["version"]),
    }));
  },

  async books(connection) {
    // From one name to the next, by the index: levels are many, stocks are few.
    const rows = await askSafely(
      connection,
      sql`WITH RECURSIVE books (name) AS (
    (SELECT t.book FROM ${own("stock_level")} t ORDER BY t.book LIMIT 1)
    UNION ALL SELECT (SELECT t.book FROM ${own("stock_level")} t WHERE t.book > b.name ORDER BY t.book LIMIT 1)
    FROM books b WHERE b.name IS NOT NULL)
  SELECT b.name, (SELECT pg_catalog.count(*) FROM (SELECT FROM ${own("stock_level")} t WHERE t.book = b.name LIMIT 100000) x)::pg_catalog.text AS levels,
    (SELECT t.elsewhere FROM ${own("stock_level")} t WHERE t.book = b.name ORDER BY t.sku, t.location LIMIT 1) AS elsewhere
  FROM books b WHERE b.name IS NOT NULL`,
    );
    return rows.map((row) => ({
      name: String(row["name"]),
      levels: Number(row["levels"]),
      elsewhere: isTrue(row["elsewhere"]),
    }));
  },

  async history(connection, book, filter, { after, most }) {
    const [micros, level, version] = (after ?? "").split(".");
    const at = sql`('epoch'::pg_catalog.timestamptz + ${micros}::pg_catalog.text::bigint * interval '1 microsecond')`;
    // The first condition is for the index, which does not have them in this order.
    const below = after
      ? [
          sql`m.at <= ${at}`,
          sql`(m.at, m.level, m.version) < (${at}, ${level}::pg_catalog.text::bigint, ${version}::pg_catalog.text::bigint)`,
        ]
      : [];
    const page = sql`ORDER BY m.at DESC, m.level DESC, m.version DESC LIMIT ${String(most)}::pg_catalog.text::int`;
    const where = [...movementsOf(filter), ...below];
    // Of each level of a SKU a page by the index, then one of these: of 400,000 movements 4 ms in place of 1,000.
    const from =
      filter.sku !== undefined && filter.referenceId === undefined
        ? sql`FROM ${own("stock_level")} t, LATERAL (SELECT m.* FROM ${own("stock_movement")} m
  WHERE ${sql.join([sql`m.level = t.id`, ...where], " AND ")} ${page}) m WHERE ${sql.join(levelsOf(book, filter), " AND ")}`
        : sql`FROM ${own("stock_movement")} m JOIN ${own("stock_level")} t ON t.id = m.level
  WHERE ${sql.join([...levelsOf(book, filter), ...where], " AND ")}`;
    const rows = await askSafely(
      connection,
      sql`SELECT t.sku, t.location, m.version, m.kind, m.quantity, m.balance, m.source, m.reference_type, m.reference_id, m.external_id,
  m.user_id, m.note, m.origin, m.level, (extract(epoch FROM m.at) * 1000000)::bigint::pg_catalog.text AS micros
  ${from} ${page}`,
    );
    return rows.map((row): StockMovement => ({
      sku: String(row["sku"]),
      location: String(row["location"]),
      version: Number(row["version"]),
      kind: String(row["kind"]),
      quantity: Number(row["quantity"]),
      balance: Number(row["balance"]),
      at: Number(row["micros"]) / 1000,
      source: String(row["source"]),
      referenceType: text(row["reference_type"]),
      referenceId: text(row["reference_id"]),
      id: String(row["external_id"]),
      by: text(row["user_id"]),
      note: text(row["note"]),
      of: text(row["origin"]),
      cursor: `${String(row["micros"])}.${String(row["level"])}.${String(row["version"])}`,
    }));
  },

  async levelAt(connection, book, { sku, location }, at) {
    const [row] = await askSafely(
      connection,
      // A movement is shown with the millisecond in which it was made: all of that one counts.
      sql`SELECT ${own("stock_level_at")}(t.id, ${momentOf(at)} + interval '999 microseconds')::pg_catalog.text AS level FROM ${own("stock_level")} t
  WHERE t.book = ${book.name}::pg_catalog.text AND t.sku = ${sku}::pg_catalog.text AND t.location = ${location}::pg_catalog.text`,
    );
    return typeof row?.["level"] === "string" ? Number(row["level"]) : undefined;
  },

  async channels(connection, book, filter) {
    const rows = await askSafely(
      connection,
      sql`SELECT m.source, pg_catalog.count(*)::pg_catalog.text AS movements, coalesce(pg_catalog.sum(m.quantity) FILTER (WHERE m.quantity > 0), 0)::pg_catalog.text AS increased,
  coalesce(-pg_catalog.sum(m.quantity) FILTER (WHERE m.quantity < 0), 0)::pg_catalog.text AS decreased
  FROM ${own("stock_movement")} m JOIN ${own("stock_level")} t ON t.id = m.level WHERE ${matching(book, filter)}
  GROUP BY m.source ORDER BY m.source COLLATE "C"`,
    );
    return rows.map((row) => ({
      source: String(row["source"]),
      movements: Number(row["movements"]),
      increased: Number(row["increased"]),
      decreased: Number(row["decreased"]),
    }));
  },
};

const upkeep: StockUpkeep<SqlConnection> = {
  async facts(connection, book, { sku, location, after, most }) {
    const rows = await askSafely(
      connection,
      sql`WITH level AS (
    SELECT t.id, t.sku, t.location, coalesce(o.on_hand, t.on_hand) AS on_hand, t.reserved, t.version,
      coalesce((SELECT max(m.version) FROM ${own("stock_movement")} m WHERE m.level = t.id AND m.kind = 'repair'), 0) AS mended
    FROM ${own("stock_level")} t LEFT JOIN ${
      book.table
        ? sql`${own("stock_levels")}(${book.name}::pg_catalog.text, ${place(book, callersPath)}, ${sku === undefined ? null : list([sku])}::pg_catalog.text::pg_catalog.text[], NULL::pg_catalog.text) o
      ON o.sku = t.sku AND o.location = t.location`
        : sql.raw("(SELECT NULL::bigint AS on_hand) o ON true")
    }
    WHERE t.book = ${book.name}::pg_catalog.text AND (t.sku, t.location) > (${after?.sku ?? ""}::pg_catalog.text, ${after?.location ?? ""}::pg_catalog.text)
      AND (${sku ?? null}::pg_catalog.text IS NULL OR t.sku = ${sku ?? null}::pg_catalog.text)
      AND (${location ?? null}::pg_catalog.text IS NULL OR t.location = ${location ?? null}::pg_catalog.text)
    ORDER BY t.sku, t.location LIMIT ${String(most)}::pg_catalog.text::int),
  chain AS (
    SELECT l.id, m.version, m.quantity, m.balance, m.at, l.mended,
      pg_catalog.lag(m.version) OVER w AS before_version, pg_catalog.lag(m.balance) OVER w AS before_balance
    FROM level l JOIN ${own("stock_movement")} m ON m.level = l.id
    WINDOW w AS (PARTITION BY l.id ORDER BY m.version)),
  checked AS (
    SELECT c.id, pg_catalog.count(*) AS n, pg_catalog.sum(c.quantity) AS total,
      pg_catalog.json_agg(pg_catalog.json_build_object('version', c.version, 'quantity', c.quantity, 'balance', c.balance,
        'before', CASE WHEN c.before_version IS NOT NULL THEN pg_catalog.json_build_object('version', c.before_version, 'balance', c.before_balance) END,
        'at', extract(epoch FROM c.at) * 1000) ORDER BY c.version)
      FILTER (WHERE c.version > c.mended AND (c.version <> coalesce(c.before_version, 0) + 1
        OR c.balance <> coalesce(c.before_balance, 0) + c.quantity)) AS breaks
    FROM chain c GROUP BY c.id)
  SELECT l.sku, l.location, l.on_hand::pg_catalog.text, l.reserved::pg_catalog.text, l.version::pg_catalog.text, coalesce(c.n, 0)::pg_catalog.text AS n,
    coalesce(c.total, 0)::pg_catalog.text AS total,
    (SELECT coalesce(pg_catalog.sum(x.quantity), 0) FROM ${own("stock_reserved")} x WHERE x.level = l.id)::pg_catalog.text AS open,
    (SELECT pg_catalog.json_build_object('version', m.version, 'balance', m.balance) FROM ${own("stock_movement")} m
      WHERE m.level = l.id ORDER BY m.version DESC LIMIT 1)::pg_catalog.text AS newest, c.breaks::pg_catalog.text
  FROM level l LEFT JOIN checked c ON c.id = l.id ORDER BY l.sku, l.location`,
    );
    return rows.map((row): Facts => {
      const breaks = JSON.parse(text(row["breaks"]) ?? "[]") as (Omit<Break, "before"> & {
        before: Break["before"] | null;
      })[];
      return {
        sku: String(row["sku"]),
        location: String(row["location"]),
        onHand: Number(row["on_hand"]),
        reserved: Number(row["reserved"]),
        version: Number(row["version"]),
        open: Number(row["open"]),
        sum: Number(row["total"]),
        movements: Number(row["n"]),
        newest: text(row["newest"]) ? (JSON.parse(String(row["newest"])) as Facts["newest"]) : undefined,
        breaks: breaks.map(({ before, ...each }) => ({ ...each, before: before ?? undefined })),
      };
    });
  },

  async repair(connection, book, { sku, location }, { id, trust, about: { source, by, note } }) {
    const mending = ask(
      connection,
      sql`SELECT ${own("stock_mend")}(${byMap(sql`${book.name}::pg_catalog.text`)}, ${place(book)}, ${sku}::pg_catalog.text, ${location}::pg_catalog.text, ${id}::pg_catalog.text,
  ${source}::pg_catalog.text, ${by ?? null}::pg_catalog.text, ${note ?? null}::pg_catalog.text, ${trust}::pg_catalog.text)`,
    );
    await mending.catch((error: unknown) => {
      const { code, message } = (connection.unwrap?.(error) ?? error ?? {}) as DriverError;
      // The function's own refusal, which says what to do.
      throw code === "23000" && message !== undefined ? new UsageError(message, "HF_USAGE", error) : error;
    });
  },
};

export const ownTables: StockOwnTables<SqlConnection> = {
  async adopt(connection, book) {
    const page = 1000;
    for (let opened = 0; ;) {
      const [row] = await ask(
        connection,
        sql`SELECT ${own("stock_open")}(${byMap(sql`${book.name}::pg_catalog.text`)}, ${place(book)}, ${String(page)}::pg_catalog.text::int) AS n`,
      );
      const n = Number(row?.["n"]);
      opened += n;
      if (n < page) return opened;
    }
  },

  guard: (book) => guardIn(dialect.names, book),
};

export const stocks: StockStore<SqlConnection> = {
  async decide(connection, book, orders, { make, look, waitMs }) {
    const [first] = orders;
    const [line] = first?.lines ?? [];
    const plain = !book.table && orders.every(({ kind }) => kind === "apply" || kind === "transfer");
    if (plain && orders.length === 1 && first?.lines.length === 1 && line)
      return [await moveOne(connection, book, first, line, look, waitMs)];
    if (plain && orders.length === 1 && first)
      return moveSome(connection, book, first, { make, look, waitMs });
    const { levels, steps } = laid(orders);
    const about = (name: keyof StockOrder["about"]) =>
      sql`${list(orders.map((order) => order.about[name]))}::pg_catalog.text::pg_catalog.text[]`;
    const level = (name: keyof Lane) => list(levels.map((each) => each[name]));
    const step = (name: keyof Step) => list(steps.map((each) => each[name]));
    const [row] = await askOften(
      connection,
      sql`SELECT missing, at, verdicts::pg_catalog.text, ats::pg_catalog.text, untils::pg_catalog.text, pg_catalog.array_to_string(states, ',', '-') AS states, moved::pg_catalog.text,
  balances::pg_catalog.text, versions::pg_catalog.text, rooms::pg_catalog.text${impatient(waitMs)} FROM ${own("stock_apply")}(${sql.raw(String(plain))},
  ${level("sum")}::pg_catalog.text::bigint[], ${level("count")}::pg_catalog.text::int[], ${level("lowest")}::pg_catalog.text::bigint[],
  ${step("sum")}::pg_catalog.text::bigint[], ${step("count")}::pg_catalog.text::int[],
  ${patient(book, waitMs)}, ${place(book)}, ${sql.raw(String(make))}, ${sql.raw(String(look))},
  ${level("sku")}::pg_catalog.text::pg_catalog.text[], ${level("location")}::pg_catalog.text::pg_catalog.text[], ${level("into")}::pg_catalog.text::boolean[],
  ${list(orders.map(({ kind }) => kind))}::pg_catalog.text::pg_catalog.text[], ${list(orders.map(({ id }) => id))}::pg_catalog.text::pg_catalog.text[],
  ${about("source")}, ${about("referenceType")}, ${about("referenceId")}, ${about("by")}, ${about("note")},
  ${list(orders.map(({ kind, id }) => (kind === "reserve" ? id : undefined)))}::pg_catalog.text::pg_catalog.text[],
  ${list(orders.map(({ ttlMs }) => ttlMs))}::pg_catalog.text::bigint[], ${list(orders.map(({ lines }) => lines.length))}::pg_catalog.text::int[],
  ${step("place")}::pg_catalog.text::int[], ${step("order")}::pg_catalog.text::int[], ${step("line")}::pg_catalog.text::int[], ${step("quantity")}::pg_catalog.text::bigint[])`,
    );
    if (row?.["missing"] === true || row?.["missing"] === "t") return undefined;
    return verdicts(orders, row ?? {});
  },

  async follow(connection, book, { kind, id, of, about, lines }: Sequel, { waitMs }): Promise<OrderVerdict> {
    const [row = {}] = await askOften(
      connection,
      sql`SELECT at, verdict, entered, until, state, pg_catalog.array_to_json(skus)::pg_catalog.text AS skus, pg_catalog.array_to_json(locations)::pg_catalog.text AS locations,
  moved::pg_catalog.text, balances::pg_catalog.text, versions::pg_catalog.text, rooms::pg_catalog.text${impatient(waitMs)}
  FROM ${own("stock_follow")}(${patient(book, waitMs)}, ${place(book)}, ${kind}::pg_catalog.text, ${id}::pg_catalog.text, ${about.source || null}::pg_catalog.text,
  ${about.referenceType ?? null}::pg_catalog.text, ${about.referenceId ?? null}::pg_catalog.text, ${about.by ?? null}::pg_catalog.text, ${about.note ?? null}::pg_catalog.text,
  ${of}::pg_catalog.text, ${lines ? list(lines.map(({ sku }) => sku)) : null}::pg_catalog.text::pg_catalog.text[],
  ${lines ? list(lines.map(({ location }) => location)) : null}::pg_catalog.text::pg_catalog.text[],
  ${lines ? list(lines.map(({ quantity }) => quantity)) : null}::pg_catalog.text::bigint[])`,
    );
    const skus = JSON.parse(text(row["skus"]) ?? "[]") as string[];
    const locations = JSON.parse(text(row["locations"]) ?? "[]") as string[];
    const column = columns(row);
    return {
      outcome: outcomes[Number(row["verdict"])] as StockOutcome,
      at: Number(row["entered"]),
      until: row["until"] === null ? undefined : Number(row["until"]),
      state: text(row["state"]),
      lines: skus.map((sku, i) => lineVerdict({ sku, location: locations[i] ?? "" }, column, i, 0)),
    };
  },

  async minimum(connection, book, { sku, location }, min, { waitMs }) {
    if (book.table)
      await ask(
        connection,
        sql`SELECT ${own("stock_adopt")}(${byMap(sql`${book.name}::pg_catalog.text`)}, ${place(book)},
  ${list([sku])}::pg_catalog.text::pg_catalog.text[], ${list([location])}::pg_catalog.text::pg_catalog.text[])`,
      );
    const [row = {}] = await ask(
      connection,
      sql`SELECT f.*${impatient(waitMs)} FROM ${own("stock_minimum")}(${patient(book, waitMs)}, ${sku}::pg_catalog.text, ${location}::pg_catalog.text, ${String(min)}::pg_catalog.text::bigint) f`,
    );
    return {
      outcome: outcomes[Number(row["verdict"])] as StockOutcome,
      at: Number.NaN,
      until: undefined,
      state: undefined,
      lines: [
        {
          sku,
          location,
          quantity: 0,
          onHand: Number(row["balance"]),
          version: Number(row["version"]),
          room: Number(row["room"]),
        },
      ],
    };
  },

  lists,
  upkeep,
  ownTables,
};

interface Lane {
  readonly sku: string;
  readonly location: string;
  /** Something is put into it. */
  into: boolean;
  sum: number;
  count: number;
  lowest: number;
}

interface Step {
  /** Of its level, from 1. */
  readonly place: number;
  readonly quantity: number;
  /** Of its order, and the how manieth line of it, from 1. */
  readonly order: number;
  readonly line: number;
  /** The sum of its level up to here, and the how manieth line of it. */
  readonly sum: number;
  readonly count: number;
}

/** Each level once, and lines one after the other. */
function laid(orders: readonly StockOrder[]): {
  readonly levels: readonly Lane[];
  readonly steps: readonly Step[];
} {
  const known = new Map<string, number>();
  const levels: Lane[] = [];
  const steps: Step[] = [];
  for (const [o, { kind, lines }] of orders.entries())
    for (const [i, { sku, location, quantity }] of lines.entries()) {
      const name = `${sku}\0${location}`;
      let place = known.get(name);
      if (place === undefined) {
        place = levels.push({ sku, location, into: false, sum: 0, count: 0, lowest: Infinity });
        known.set(name, place);
      }
      const level = levels[place - 1] as Lane;
      level.into ||= kind === "adjust" || (kind !== "reserve" && quantity >= 0);
      level.sum += quantity;
      level.count++;
      level.lowest = Math.min(level.lowest, level.sum);
      steps.push({ place, quantity, order: o + 1, line: i + 1, sum: level.sum, count: level.count });
    }
  return { levels, steps };
}

type Columns = Readonly<Record<"moved" | "balances" | "versions" | "rooms", (number | undefined)[]>>;

const columns = (row: Record<string, unknown>): Columns => ({
  moved: numbers(row["moved"]),
  balances: numbers(row["balances"]),
  versions: numbers(row["versions"]),
  rooms: numbers(row["rooms"]),
});

function lineVerdict(
  { sku, location }: { sku: string; location: string },
  column: Columns,
  i: number,
  quantity: number,
): LineVerdict {
  return {
    sku,
    location,
    quantity: column.moved[i] ?? quantity,
    onHand: column.balances[i] ?? 0,
    version: column.versions[i] ?? 0,
    room: column.rooms[i],
  };
}

function verdicts(orders: readonly StockOrder[], row: Record<string, unknown>): OrderVerdict[] {
  const at = Number(row["at"]);
  const kinds = numbers(row["verdicts"]);
  const [ats, untils] = [numbers(row["ats"]), numbers(row["untils"])];
  const states = String(row["states"] ?? "").split(",");
  const column = columns(row);
  let next = 0;
  return orders.map(({ lines }, o): OrderVerdict => {
    const start = next;
    next += lines.length;
    return {
      // The short way says nothing: all of them are done.
      outcome: outcomes[kinds[o] ?? 1] as StockOutcome,
      at: ats[o] ?? at,
      until: untils[o],
      // The short way says nothing here either.
      state: states[o] === "-" ? undefined : states[o] || undefined,
      lines: lines.map((line, i) => lineVerdict(line, column, start + i, line.quantity)),
    };
  });
}

async function moveOne(
  connection: SqlConnection,
  book: StockBook,
  { kind, id, about }: StockOrder,
  { sku, location, quantity }: OrderLine,
  look: boolean,
  waitMs: number,
): Promise<OrderVerdict> {
  const [row = {}] = await askOften(
    connection,
    sql`SELECT f.*${impatient(waitMs)} FROM ${own("stock_move")}(${patient(book, waitMs)}, ${sql.raw(String(look))}, ${sku}::pg_catalog.text, ${location}::pg_catalog.text,
  ${String(quantity)}::pg_catalog.text::bigint, ${kind}::pg_catalog.text, ${id}::pg_catalog.text, ${about.source}::pg_catalog.text, ${about.referenceType ?? null}::pg_catalog.text,
  ${about.referenceId ?? null}::pg_catalog.text, ${about.by ?? null}::pg_catalog.text, ${about.note ?? null}::pg_catalog.text) f`,
  );
  return {
    outcome: outcomes[Number(row["verdict"])] as StockOutcome,
    at: Number(row["entered"]),
    until: undefined,
    state: undefined,
    lines: [
      {
        sku,
        location,
        quantity: row["moved"] === null ? quantity : Number(row["moved"]),
        onHand: Number(row["balance"]),
        version: Number(row["version"]),
        room: row["room"] === null ? undefined : Number(row["room"]),
      },
    ],
  };
}

async function moveSome(
  connection: SqlConnection,
  book: StockBook,
  { kind, id, about, lines }: StockOrder,
  { make, look, waitMs }: { readonly make: boolean; readonly look: boolean; readonly waitMs: number },
): Promise<readonly OrderVerdict[] | undefined> {
  const [row = {}] = await askOften(
    connection,
    sql`SELECT missing, verdict, entered, moved::pg_catalog.text, balances::pg_catalog.text, versions::pg_catalog.text, rooms::pg_catalog.text${impatient(waitMs)}
  FROM ${own("stock_order")}(${patient(book, waitMs)}, ${sql.raw(String(make))}, ${sql.raw(String(look))},
  ${list(lines.map(({ sku }) => sku))}::pg_catalog.text::pg_catalog.text[], ${list(lines.map(({ location }) => location))}::pg_catalog.text::pg_catalog.text[],
  ${list(lines.map(({ quantity }) => quantity))}::pg_catalog.text::bigint[], ${kind}::pg_catalog.text, ${id}::pg_catalog.text, ${about.source}::pg_catalog.text,
  ${about.referenceType ?? null}::pg_catalog.text, ${about.referenceId ?? null}::pg_catalog.text, ${about.by ?? null}::pg_catalog.text, ${about.note ?? null}::pg_catalog.text)`,
  );
  if (row["missing"] === true || row["missing"] === "t") return undefined;
  const column = columns(row);
  return [
    {
      outcome: outcomes[Number(row["verdict"])] as StockOutcome,
      at: Number(row["entered"]),
      until: undefined,
      state: undefined,
      lines: lines.map((line, i) => lineVerdict(line, column, i, line.quantity)),
    },
  ];
}

function matching(book: StockBook, filter: MovementFilter): Statement {
  return sql.join([...levelsOf(book, filter), ...movementsOf(filter)], " AND ");
}

function levelsOf(book: StockBook, { sku, location }: MovementFilter): Statement[] {
  const conditions = [sql`t.book = ${book.name}::pg_catalog.text`];
  if (sku !== undefined) conditions.push(sql`t.sku = ${sku}::pg_catalog.text`);
  if (location !== undefined) conditions.push(sql`t.location = ${location}::pg_catalog.text`);
  return conditions;
}

function movementsOf({ source, referenceType, referenceId, from, to }: MovementFilter): Statement[] {
  const conditions: Statement[] = [];
  if (source !== undefined) conditions.push(sql`m.source = ${source}::pg_catalog.text`);
  if (referenceType !== undefined) conditions.push(sql`m.reference_type = ${referenceType}::pg_catalog.text`);
  if (referenceId !== undefined)
    conditions.push(sql`m.reference_id = ${referenceId}::pg_catalog.text AND m.external_id IN (
  SELECT f.external_id FROM ${own("stock_movement")} f WHERE f.reference_id = ${referenceId}::pg_catalog.text AND f.line = 1)`);
  if (from !== undefined) conditions.push(sql`m.at >= ${momentOf(from)}`);
  if (to !== undefined) conditions.push(sql`m.at < ${momentOf(to)}`);
  return conditions;
}

/** The caller's table has a trigger for each schema that keeps its stock. */
export function guardIn(names: Names, { table }: StockBook): string[] {
  if (!table) return [];
  const name = table.table.map((part) => dialect.quote(part)).join(".");
  const column = dialect.quote(table.onHand);
  const called = names.label("stock_guard");
  const trigger = names === dialect.names ? called : dialect.quote(called);
  return [
    `DROP TRIGGER IF EXISTS ${trigger} ON ${name};`,
    `CREATE TRIGGER ${trigger} BEFORE UPDATE OF ${column} ON ${name} FOR EACH ROW WHEN (OLD.${column} IS DISTINCT FROM NEW.${column}) EXECUTE FUNCTION ${names.own("stock_guard")}();`,
  ];
}
