/** What `holdfast exec` writes down of the commands that it runs: who follows one must know how it ended. */
import { type Statement, own, sql } from "../../seam/sql.ts";

/** What columns are made of. `suffix`: what follows the list of them. */
export interface ExecColumns {
  readonly id: string;
  readonly text: string;
  readonly suffix?: string;
}

/** Moments are milliseconds since 1970 by the database's clock. `ended` is NULL while the command runs, or if its holdfast was killed. */
export function execTable({ id, text, suffix = "" }: ExecColumns): readonly Statement[] {
  const [ids, texts] = [sql.raw(id), sql.raw(text)];
  return [
    sql`CREATE TABLE IF NOT EXISTS ${own("exec_run")} (
  lock_id ${ids} NOT NULL,
  id ${ids} NOT NULL,
  name ${texts} NOT NULL,
  session ${texts} NOT NULL,
  host ${texts} NOT NULL,
  process bigint NOT NULL,
  command ${texts} NOT NULL,
  started bigint NOT NULL,
  ended bigint,
  code integer,
  PRIMARY KEY (lock_id, id)
)${sql.raw(suffix)}`,
  ];
}
