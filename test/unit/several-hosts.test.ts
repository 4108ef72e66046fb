import { holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Pool } from "pg";
import { expect, test } from "vitest";

test.each([
  ["several hosts", "postgres://app:se,cret@a:1,b:2/shop", /names several hosts/],
  ["a comma elsewhere", "postgres://app:se,cret@a:x/shop,2", /Invalid URL/],
])("pg: a URL with %s", async (_, connectionString, message) => {
  const hf = holdfast(fromPg(new Pool({ connectionString })));
  const error: unknown = await hf.transaction({ lock: key("a") }, async () => {}).catch((e: unknown) => e);
  expect(error).toMatchObject({
    code: "HF_NO_CONNECTION",
    message: expect.stringMatching(message) as string,
  });
  expect(String(error)).not.toContain("cret");
});
