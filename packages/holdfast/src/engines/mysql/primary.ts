/**
 * Answers of the primary. Outside of transactions a statement may reach a replica: by a splitter of reads and writes, or by a balancer. A
 * replica shows what was there a while ago, so a statement that reads our tables fails there. docs/decisions/0049-answers-of-the-primary.md
 */
import { randomUUID } from "node:crypto";
import type { SqlConnection } from "../../seam/database.ts";
import { ReplicaError } from "../../seam/errors.ts";
import { type Statement, sql } from "../../seam/sql.ts";

/** Prime, and so large that twice as much is out of range; whoever reads it in an error knows that it is ours. */
const large = "18446744073709551557";

/** Not 0, or it fails with 1690: for one row or none, as it is computed before the first one is looked for. */
export const atPrimary = `${large} * (1 + (@@read_only OR @@innodb_read_only))`;

/** As a condition. */
export const onPrimary = sql.raw(atPrimary);

/** As an argument of a procedure: arguments are computed before it runs. */
export function byPrimary(argument: unknown): Statement {
  return sql`CASE WHEN ${onPrimary} THEN ${argument} END`;
}

/** In words of {@link atPrimary}'s error. */
export const notPrimary = new RegExp(large);

/** A cache gives the same answer to the same question. The first one was asked by nobody before. */
export async function verifyReads(connection: SqlConnection): Promise<void> {
  const question = sql`SELECT ${randomUUID()} AS question, UUID() AS answer FROM DUAL WHERE ${onPrimary}`;
  const ask = async () => String((await connection.query(question)).rows[0]?.["answer"]);
  if ((await ask()) === (await ask())) throw ReplicaError.cache();
}
