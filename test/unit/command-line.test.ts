/** Command lines, messages and names as `holdfast` shows them to others. */
import { expect, test } from "vitest";
import { commandText } from "../../packages/cli/src/exec/record.ts";
import { withoutPasswords, word } from "../../packages/cli/src/text.ts";

test.each([
  [["psql", "postgres://app:hun@ter2@host/db"], "psql postgres://app:…@host/db"],
  [["env", "DATABASE_URL=mysql://app:hunter2@host/db", "x"], "env DATABASE_URL=mysql://app:…@host/db x"],
  [["load", "--password", "two hunter2 words"], "load --password …"],
  [["load", "--pass=two hunter2 words"], "load --pass=…"],
  [["load", "password", "hunter2"], "load password …"],
  [["load", "--access-key-id=hunter2"], "load --access-key-id=…"],
  [["load", '{"password": "hun ter2"}'], 'load {"password": …}'],
  [["sh", "-c", "exec env PGPASSWORD='hunter2 too' psql"], "sh -c exec env PGPASSWORD=… psql"],
  [["curl", "-H", "Authorization: Bearer hunter2"], "curl -H Authorization: …"],
  [["curl", "-u", "app:hunter2", "host"], "curl -u app:… host"],
  [["mysql", "-phunter2", "-u", "root"], "mysql -p… -u root"],
  [["sshpass", "-p", "hunter2", "ssh", "host"], "sshpass -p … ssh host"],
  [["npm", "run", "migrate", "--", "--port", "80"], "npm run migrate -- --port 80"],
])("%j", (words, shown) => {
  expect(commandText(words)).toBe(shown);
});

test.each([
  ["open 'postgres://app:hun@ter2@host/db'", "open 'postgres://app:…@host/db'"],
  ["postgres://host/db?user=app&password=hunter2&x=1", "postgres://host/db?user=app&password=…&x=1"],
  ["host=h sslpassword=hunter2 port=1", "host=h sslpassword=… port=1"],
  ["See https://host:443/a and a@b.", "See https://host:443/a and a@b."],
])("%s", (text, shown) => {
  expect(withoutPasswords(text)).toBe(shown);
});

test.each([
  ["export:1", "export:1"],
  ["a; touch b", "'a; touch b'"],
  ["it's", String.raw`'it'\''s'`],
  ["--all", "'--all'"],
  ["", "''"],
])("a shell is given %j as %s", (name, written) => {
  expect(word(name)).toBe(written);
});
