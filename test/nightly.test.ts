import { execFile } from "node:child_process";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { expect, test } from "vitest";
import { createDatabase, unavailable } from "./harness/databases.ts";

const worker = fileURLToPath(new URL("./workers/nightly.ts", import.meta.url));
const why = unavailable("postgres");

test("the nightly work of the quick start is done once by five instances", async ({ skip }) => {
  skip(why !== undefined, why);
  const docs = readFileSync(new URL("../docs/quick-start.md", import.meta.url), "utf8");
  const [, block = "nothing"] = /```ts\nimport \{ once \} from "holdfast";\n\n([^]*?)```/.exec(docs) ?? [];
  expect(readFileSync(worker, "utf8")).toContain(block);

  const database = await createDatabase("postgres");
  const pool = new Pool({ connectionString: database.url, max: 2 });
  try {
    await holdfast(fromPg(pool)).migrate();
    await pool.query("CREATE TABLE report (day date NOT NULL)");
    const instances = Array.from({ length: 5 }, () =>
      promisify(execFile)(process.execPath, ["--conditions=holdfast-source", worker, database.url]),
    );
    const said = (await Promise.all(instances)).map(({ stdout }) => stdout.trim());
    expect(said.toSorted()).toEqual([...Array<string>(4).fill("Another instance wrote it"), "written"]);
    expect((await pool.query("SELECT FROM report")).rowCount).toBe(1);
  } finally {
    await pool.end();
    await database.drop();
  }
});
