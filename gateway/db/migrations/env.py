"""Alembic's entry: it runs on the connection that `gateway.db.schema` hands over, in that one's transaction."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, render_as_batch=connection.dialect.name == "sqlite")
with context.begin_transaction():
    context.run_migrations()
