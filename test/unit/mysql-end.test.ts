/** The end of a transaction when the call that commits it is ended half-way: too short a moment to be met for real. */
import { expect, test } from "vitest";
import type { Capabilities } from "../../packages/holdfast/src/seam/capabilities.ts";
import type { Row, SqlConnection } from "../../packages/holdfast/src/seam/database.ts";
import { CommitUnknownError } from "../../packages/holdfast/src/seam/errors.ts";
import { mysql, render } from "../../packages/holdfast/src/engines/mysql/index.ts";
import { key } from "../../packages/holdfast/src/index.ts";

const killed = Object.assign(new Error("Query execution was interrupted"), { errno: 1317 });

/** Commits a transaction on a server that ends the call, and then has these settings. */
async function commit(settings: Row): Promise<boolean> {
  const connection: SqlConnection = {
    lost: new AbortController().signal,
    async query(statement) {
      const { text } = render(statement);
      if (text.startsWith("CALL holdfast_commit_")) throw killed;
      return { rows: text.includes("@@autocommit") ? [settings] : [], affected: 0 };
    },
  };
  const { begun = {} } = await mysql.begin(connection, {
    begun: false,
    lockFirst: false,
    isolation: "read committed",
    readOnly: false,
    deadlineMs: 1000,
    locks: [{ key: key("a"), mode: "exclusive" }],
    wait: 1000,
    names: ["a"],
    capabilities: { flavour: "mysql", sessionLocks: "session advisory" } as Capabilities,
  });
  return mysql.end(connection, "commit", begun);
}

test("autocommit that is on again says that it was committed; the connection is not for others", async () => {
  expect(await commit({ now: 1, earlier: 1 })).toBe(false);
});

test("autocommit that is still off says that it was not", async () => {
  await expect(commit({ now: 0, earlier: 1 })).rejects.toBe(killed);
});

test("a session without autocommit cannot tell", async () => {
  await expect(commit({ now: 0, earlier: 0 })).rejects.toBeInstanceOf(CommitUnknownError);
});
