/**
 * Read, decide, and then compare and write in one message: nothing is locked while a message travels, and nobody is waited for. What somebody
 * has, or has changed meanwhile, is decided again under locks.
 */
import type { SqlConnection } from "../../seam/database.ts";
import { type Statement, sql } from "../../seam/sql.ts";
import type { CallStatements } from "./dialect.ts";
import type { Exchanges } from "./exchange.ts";
import type { StoredRows } from "./rows.ts";
import type { NewRow, RowOf, Table } from "./table.ts";

/** What is to be done, of rows that have an `id` and are as they were read. */
export interface Changes<Of extends Table = Table, Into extends Table = Table> {
  readonly changed: readonly { readonly before: RowOf<Of>; readonly after: RowOf<Of> }[];
  readonly added: readonly NewRow<Into>[];
  /** From this moment on it would be decided otherwise. */
  readonly until?: number | undefined;
}

/** What is to be decided, of rows by these names. */
export interface OneCallQuestion<Of extends Table, Into extends Table, Answer> {
  readonly of: Of;
  readonly into: Into;
  /** What of a row is compared, and what is set. */
  compared(row: RowOf<Of>): Partial<RowOf<Of>>;
  set(row: RowOf<Of>): Partial<RowOf<Of>>;
  /** For the memory of conflicts. */
  readonly names: readonly string[];
  nameOf(row: RowOf<Of>): string;
  readonly where: Statement;
  /** Undefined: it takes more than these rows. */
  decide(
    found: readonly RowOf<Of>[],
    now: number,
  ): ({ readonly answer: Answer } & Changes<Of, Into>) | undefined;
}

/** Undefined: it has to be done under locks. */
export async function inOneCall<C extends SqlConnection, Of extends Table, Into extends Table, Answer>(
  rows: StoredRows<C>,
  exchanges: Exchanges<C>,
  connection: C,
  question: OneCallQuestion<Of, Into, Answer>,
): Promise<Answer | undefined> {
  const { of, names, where, decide } = question;
  const call = rows.dialect.oneCall?.(connection);
  if (!call || exchanges.isHot(names)) return undefined;
  const computed = { now: ["moment", rows.dialect.clock], alone: ["integer", call.alone] } as const;
  const found = (await rows.select(connection, of, where, { computed })) as (RowOf<Of> & {
    readonly now: number;
    readonly alone: number;
  })[];
  const [first] = found;
  if (!first || first.alone !== 1) {
    await call.leave(connection);
    return undefined;
  }
  const read = found.map(({ now: _now, alone: _alone, ...row }) => row as unknown as RowOf<Of>);
  const decided = decide(read, first.now);
  if (!decided) return undefined;
  const { answer, changed, added } = decided;
  if (changed.length + added.length === 0) return answer;
  const statements = statementsOf(rows, question, decided);
  if (statements.writes.length > call.most) return undefined;
  const done = await exchanges.unlessFaster(connection, names, async () => {
    const inTheWay = new Set(await call.apply(connection, statements));
    return read.filter((row) => inTheWay.has(row["id"] as number)).map(question.nameOf);
  });
  return done ? answer : undefined;
}

/** By their number: who has it in its hands locks by name first, and is not waited for. */
function statementsOf<C extends SqlConnection, Of extends Table, Into extends Table>(
  rows: StoredRows<C>,
  { of, into, compared, set }: OneCallQuestion<Of, Into, unknown>,
  { changed, added, until }: Changes<Of, Into>,
): CallStatements {
  const same = changed.map(({ before }) => ({ id: before["id"], ...compared(before) }));
  const after = changed.map((each) => ({ id: each.before["id"], ...set(each.after) }));
  return {
    found: sql`${rows.found(of)} WHERE ${rows.matching(of, same)}`,
    ids: changed.map(({ before }) => before["id"] as number),
    until,
    writes: [
      ...(after.length > 0 ? [rows.updatingAll(of, "id", after)] : []),
      ...rows.insertions(into, added),
    ],
  };
}
