/** As the mysql command reads them. */
export function* statements(text: string): Generator<string> {
  let end = ";";
  let statement = "";
  for (const line of text.split("\n")) {
    const delimiter = /^DELIMITER (.+)$/.exec(line)?.[1];
    if (delimiter !== undefined) end = delimiter;
    else statement += line.startsWith("-- holdfast") ? "" : `${line}\n`;
    if (!statement.trimEnd().endsWith(end)) continue;
    yield statement.trimEnd().slice(0, -end.length);
    statement = "";
  }
  if (statement.trim() !== "") throw new Error(`no end of ${statement}`);
}
