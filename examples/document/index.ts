import { type Holdfast, LockNotAvailableError } from "holdfast";
import type { ClientBase } from "pg";
import { command, open } from "../support.ts";

const table = "holdfast_example_document";

interface Document {
  id: number;
  body: string;
}

type Answer = { readonly saved: string } | { readonly busy: string };

/** A person does not want to look at a page that hangs: whoever comes second is told at once who is at it. */
async function edit(
  hf: Holdfast<ClientBase>,
  id: number,
  editor: string,
  change: (body: string) => Promise<string>,
): Promise<Answer> {
  try {
    return await hf.transaction(async (tx) => {
      // What the server shows of us until the end of the transaction; an error of the other one tells it.
      await tx.client.query("SELECT set_config('application_name', $1, true)", [editor]);
      const { body } = await tx.row<Document>(table, id, { wait: "nowait" });
      const saved = await change(body);
      await tx.client.query(`UPDATE ${table} SET body = $2 WHERE id = $1`, [id, saved]);
      return { saved };
    });
  } catch (error) {
    if (!(error instanceof LockNotAvailableError)) throw error;
    const [holder] = error.holders;
    return { busy: `${holder?.application ?? "somebody"} is editing it` };
  }
}

export interface Result {
  readonly first: Answer;
  readonly second: Answer;
  readonly again: Answer;
  readonly body: string;
}

/** Ada opens the document, Bob comes while she is at it, and again when she is done. */
export async function main(url: string): Promise<Result> {
  await using place = await open(url, { [table]: "id int PRIMARY KEY, body text NOT NULL" });
  const { pool, hf } = place;
  await pool.query(`INSERT INTO ${table} VALUES (1, 'Once')`);
  const opened = Promise.withResolvers<void>();
  const finish = Promise.withResolvers<void>();
  const ada = edit(hf, 1, "Ada", async (body) => {
    opened.resolve();
    await finish.promise;
    return `${body} upon`;
  });
  await Promise.race([opened.promise, ada]);
  const second = await edit(hf, 1, "Bob", async (body) => `${body} more`).finally(finish.resolve);
  const first = await ada;
  const again = await edit(hf, 1, "Bob", async (body) => `${body} a time`);
  const { rows } = await pool.query<Document>(`SELECT * FROM ${table}`);
  return { first, second, again, body: rows[0]?.body ?? "" };
}

await command(
  import.meta.url,
  main,
  ({ first, second, again, body }) =>
    `Ada: ${told(first)}. Bob: ${told(second)}; later: ${told(again)}. It reads "${body}"`,
);

function told(answer: Answer): string {
  return "saved" in answer ? "saved" : answer.busy;
}
