"""The cockpit: a page over HTTP to a running server or gateway. In a process of its own; the engine is not imported.

process   the server's side: starts the page's process, and hands `/` and the page's paths to it
app       the page's process: NiceGUI on a socket
watched   the client of the watched server: models, answers, the live feed, the admin surface
bodies    what is sent to the page, decoded and limited
frame     header, login, navigation
presence  whether the watched server answers, and since when
readings figures   what the live feed says in figures, and how they are written
chat_request conversations    what the chat asks for and shows; what the browser keeps
fields results    labels and units of the forms; what the commands answer, as pictures
chat live forms learn     the pages

The whole package needs the extra `cockpit`: without it, importing a module of it raises the ConfigError that says so.
"""

from quire.extras import check_installed

check_installed("cockpit", "The cockpit", param="cockpit")
