/** Statements as people would write them. */

const tokens =
  /'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|\/\*[\s\S]*?\*\/|\?\d*|[:@$][A-Za-z_]\w*|;/g;

/** With the values that are bound, so that none can be taken for a part of the statement. */
export function filled(text: string, args: readonly unknown[]): string {
  const listed = args.flatMap((each) =>
    Array.isArray(each) ? (each as unknown[]) : isNamed(each) ? [] : [each],
  );
  const named = Object.assign({}, ...args.filter(isNamed)) as Record<string, unknown>;
  let next = 0;
  return text.replaceAll(tokens, (token) => {
    if (token.startsWith("?")) {
      if (token.length > 1) next = Number(token.slice(1)) - 1;
      return next < listed.length ? literal(listed[next++]) : token;
    }
    if (!/^[:@$]/.test(token)) return token;
    const name = [token, token.slice(1)].find((each) => each in named);
    return name === undefined ? token : literal(named[name]);
  });
}

function isNamed(value: unknown): value is Record<string, unknown> {
  return (
    typeof value === "object" &&
    value !== null &&
    !Array.isArray(value) &&
    !ArrayBuffer.isView(value) &&
    !(value instanceof Date)
  );
}

function literal(value: unknown): string {
  if (value === null || value === undefined) return "NULL";
  if (typeof value === "object") return value instanceof Date ? `'${value.toISOString()}'` : "'…'";
  return typeof value === "string" ? `'${value.replaceAll("'", "''")}'` : String(value);
}

/** A script's statements. One that makes a trigger stays whole: there are statements inside of it. */
export function parts(script: string): string[] {
  const ends = /\btrigger\b/i.test(script)
    ? []
    : [...script.matchAll(tokens)].flatMap(({ 0: token, index }) => (token === ";" ? [index + 1] : []));
  const cuts = [0, ...ends, script.length];
  const found = cuts
    .slice(1)
    .map((end, i) => script.slice(cuts[i], end))
    .filter((part) => part.replaceAll(/--[^\n]*|\/\*[\s\S]*?\*\/|[\s;]/g, "") !== "");
  return found.length > 0 ? found : [script];
}
